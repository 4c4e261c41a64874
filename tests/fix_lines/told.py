"""`told`: a test makes a mistake, is told the line that repairs it, and follows it."""

import contextlib
import sys
import warnings

import weft
from tests.fix_lines.sites import SOURCE, sites_of
from weft import errors


class Told:
    """What a mistake was told: `fix` is the line, `error` what was raised, if something was."""

    def __init__(self):
        self.fix, self.error = "", None

    def run(self, **names):
        """Execute the line as it is printed and return the names that are there afterwards."""
        names = {"weft": weft, **names}
        exec(compile(self.fix, "the fix: line", "exec"), names)
        return names


def site_of(file, words):
    """The one call with a `fix:` line in a file of the package whose source holds these words."""
    found = [site for site in sites_of(file) if words in site.text]
    assert len(found) == 1, f"told({file!r}, {words!r}): {len(found)} places: {[site.first for site in found]}"
    return found[0]


def _exchange(old, new):
    """Let the modules of the package have another `message`; also those that were imported in the block."""
    for name, module in sys.modules.copy().items():  # another thread may import
        if name.partition(".")[0] == "weft" and vars(module).get("message") is old:
            module.message = new


@contextlib.contextmanager
def told(file, words):
    """The block makes a mistake: an error is raised, or a warning or a line is written, by a call of the package.

    What is raised or warned ends here; the lines after the block do what `fix:` says, and nothing is raised.
    On another rank than the one that has made the mistake it may be a `PeerError` instead.

    Args:
        file: Of the package, such as "data/shuffle.py": where the call stands.
        words: Words of its source, as `ast.unparse` writes it: there is one such call in the file.
    """
    site, it, lines = site_of(file, words), Told(), []
    original = errors.message

    def record(problem, *, found, expected, fix):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == str(SOURCE / site.file) and site.first <= frame.f_lineno <= site.last:
                lines.append(fix)
                break
            frame = frame.f_back
        return original(problem, found=found, expected=expected, fix=fix)

    with contextlib.ExitStack() as stack:
        stack.callback(_exchange, record, original)
        _exchange(original, record)
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        try:
            yield it
        except (weft.errors.WeftError, ValueError, TypeError, RuntimeError, SystemExit) as error:
            if not lines and not isinstance(error, weft.errors.PeerError):
                raise
            it.error = error
            peer = isinstance(error, weft.errors.PeerError)
            assert peer or any(fix in str(error) for fix in lines) or isinstance(error, SystemExit), str(error)
    for one in caught:
        if not any(fix in str(one.message) for fix in lines):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    assert lines or it.error is not None, f"nothing was told by {site.file}:{site.first}: {site.text}"
    it.fix = lines[-1] if lines else ""


def printed(file, words, text):
    """What another process wrote holds a line of this call; returns as `told` does."""
    site, it = site_of(file, words), Told()
    lines = [part.strip() for part in text.split("fix:")[1:]]
    fitting = [line for line in lines if site.pattern.match(line)]
    assert fitting, f"{text}\n\nhas no line of {site.file}:{site.first}: {site.text}"
    it.fix = fitting[0].splitlines()[0]
    return it
