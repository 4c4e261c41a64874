"""Says why a test failed as soon as it has: a run that is cut short prints no summary."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        config.pluginmanager.register(_Why(reporter))


class _Why:
    def __init__(self, reporter):
        self._reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(report.longrepr)
            self._reporter.ensure_newline()
            for line in [line for line in said.splitlines() if line.strip()][-12:]:
                self._reporter.write_line(f"WHY {report.nodeid}: {line[:400]}")
