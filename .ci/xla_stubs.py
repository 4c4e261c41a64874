"""Make torch 2.9.0 from a package registry, which is built for CUDA, run on a CPU without 3 GB of CUDA libraries.

For each library that is missing: a stub in torch/lib that defines what torch wants of it. Every function fails as it
would without a GPU, so that `torch.cuda.is_available()` is False. For test environments; needs gcc and readelf.

    python .ci/xla_stubs.py <folder of the environment>
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

WANTED = re.compile(
    r"lib(cublas|cublasLt|cudart|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvrtc"
    r"|nvshmem_host|nvJitLink)\.so[.\d]*$"
)
NO_DEVICE = 100  # cudaErrorNoDevice
UNVERSIONED = re.compile(r"(cu|nccl|nv)\w*$")  # of libraries that have no versions; they are looked up by name alone


def read(option: str, library: Path) -> str:
    return subprocess.run(["readelf", "-W", option, library], check=True, capture_output=True, text=True).stdout


def missing(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Symbols by version tag ("" for none) by the library that should define them."""
    found: dict[str, dict[str, set[str]]] = {}
    loose: set[str] = set()
    for library in sorted(folder.glob("*.so*")):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", read("--dynamic", library))
        for name in needed:
            if WANTED.match(name) and not (folder / name).exists():
                found.setdefault(name, {})
        owner, tags = "", {}
        for line in read("--version-info", library).splitlines():
            if file := re.search(r"File: (\S+)", line):
                owner = file[1]
            elif tag := re.search(r"Name: (\S+)\s+Flags", line):
                tags[tag[1]] = owner
        for symbol, tag in re.findall(r" UND (\w+)(?:@(\S+))?", read("--dyn-syms", library)):
            if tags.get(tag, "") in found:
                found[tags[tag]].setdefault(tag, set()).add(symbol)
            elif not tag and UNVERSIONED.match(symbol):
                loose.add(symbol)
    if loose and found:
        keeper = next((name for name in found if "cupti" in name), min(found))
        found[keeper].setdefault("", set()).update(loose)
    return found


def compile_stub(folder: Path, name: str, symbols: dict[str, set[str]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        every = sorted(set().union(*symbols.values())) if symbols else []
        result = {one: 0 if one.startswith("__") else NO_DEVICE for one in every}
        source.write_text("".join(f"long {one}(void) {{ return {code}; }}\n" for one, code in result.items()))
        tagged = {tag: names for tag, names in symbols.items() if tag}
        script.write_text(
            "".join(f"{tag} {{ global: {'; '.join(sorted(names))}; }};\n" for tag, names in tagged.items())
        )
        options = [f"-Wl,--version-script={script}"] if tagged else []
        target = folder / name
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", *options, source, "-o", target],
            check=True,
        )


def main(environment: Path) -> None:
    folder = next(environment.glob("lib/python3*/site-packages/torch/lib"))
    stubs = missing(folder)
    for name, symbols in stubs.items():
        compile_stub(folder, name, symbols)
    print(f"{len(stubs)} stub libraries in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
