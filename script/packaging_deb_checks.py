"""Install a Debian package, use it as an ordinary user, and remove it. For a machine that nobody needs: packaging_roots.py makes one.

Run as root, inside:

    packaging_deb_checks.py FILE.deb PROGRAMS [PID]

With the PID of a stopped vectoradd outside, let it continue and measure it, but neither install what the package only recommends nor
try an upgrade.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from packaging_checks import (
    COMMANDS,
    HIP_EXAMPLE,
    USER,
    CheckError,
    User,
    check_tools,
    check_what_check_says,
    expect,
    measure_over,
    say,
    usable_examples,
)

COMPILERS = ("gcc", "cc", "g++", "clang", "zig")
# The names of AMD's runtime in the distributions.
AMD_RUNTIMES = ("libamdhip64-5", "libamdhip64-6", "libamdhip64-7")
PLACES = ("/etc", "/opt", "/usr", "/var")
COMPLETE = """
source /usr/share/bash-completion/bash_completion
source /usr/share/bash-completion/completions/{name} && complete -p {name} >/dev/null || exit 1
COMP_WORDS=({name} --h) COMP_CWORD=1 COMP_LINE='{name} --h' COMP_POINT={point}
_gpubpf {name} --h {name}
echo "completed: ${{COMPREPLY[*]}}"
"""


def apt(*words: str | Path) -> float:
    """Run apt-get; return how long it took, in seconds. Raises CheckError."""
    started = time.monotonic()
    command = ["apt-get", "-q", "-y", "-o", "APT::Sandbox::User=root", *map(str, words)]
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise CheckError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-3000:]}")
    return time.monotonic() - started


def check_places(user: User) -> None:
    """Each command prints its help, its man page opens, and its completion loads and completes."""
    for name in COMMANDS:
        expect(user.run(name, "--help"), name)
        expect(user.run("man", "--pager=cat", name), rf"(?s)NAME\s+{name} ")
        script = COMPLETE.format(name=name, point=len(name) + 4)
        expect(user.run("bash", "-c", script), "completed: .*--help")


def check_without_compiler(user: User, deb: Path, programs: Path) -> None:
    """The package alone brings no compiler. What needs one says so; with what the package recommends, everything works."""
    if found := [name for name in COMPILERS if Path("/usr/bin", name).exists()]:
        raise CheckError(f"the package needs a compiler: {', '.join(found)}")
    if (programs / "vectoradd").exists():
        done = user.run("cudasim", "--", programs / "vectoradd", status=1)
        expect(done, "needs a C compiler and found none; install gcc or clang")
    check_what_check_says(user, (), compiler=False)
    apt("purge", "gpubpf")
    say(f"  installed with what it recommends in {apt('install', deb):.0f} s")
    if re.search(r"Candidate: 5\.7", user.run("apt-cache", "policy", "libhsa-runtime64-1").text):
        say("  left out: HIP programs; ROCr 5.7 opens the GPU through libdrm, which hipsim does not have")
    elif (programs / HIP_EXAMPLE).exists():
        done = user.run("apt-cache", "pkgnames", "libamdhip64")
        for name in sorted({*AMD_RUNTIMES} & {*done.text.split()})[:1]:
            apt("install", "--no-install-recommends", name)


def check_upgrade(user: User, deb: Path, programs: Path) -> None:
    """Install a newer version while a tool of the older one runs."""
    with tempfile.TemporaryDirectory() as scratch:
        tree, older = Path(scratch, "tree"), Path(scratch, "older.deb")
        subprocess.run(["dpkg-deb", "-R", deb, tree], check=True)
        control = tree / "DEBIAN/control"
        control.write_text(control.read_text().replace("\nVersion: ", "\nVersion: 0~", 1))
        subprocess.run(["dpkg-deb", "-Znone", "-b", tree, older], check=True, stdout=subprocess.DEVNULL)
        apt("install", "--allow-downgrades", older)
    measure_over(user, programs, lambda: apt("install", deb))


def our_files() -> set[str]:
    """Return the files of this machine that have a name of the package's. Users' caches are elsewhere."""
    names = ("*gpubpf*", *COMMANDS, *(f"{name}.8*" for name in COMMANDS))
    tests = [word for name in names for word in ("-o", "-name", name)][1:]
    done = subprocess.run(["find", *PLACES, *tests], capture_output=True, text=True)
    return set(done.stdout.splitlines())


def check_deb(deb: Path, programs: Path, outside: str = "") -> None:
    """Raise CheckError if the package does not do what it should. programs: a directory of built examples."""
    home = programs / "user"
    home.mkdir()
    os.chown(home, USER, USER)
    user = User(home, Path("/usr"))
    say(f"{deb.name}, {Path('/etc/os-release').read_text().partition('PRETTY_NAME=')[2].splitlines()[0]}")
    before = our_files()
    apt("update")
    took = apt("install", "--no-install-recommends", deb, "man-db", "bash-completion")
    say(f"  installed in {took:.0f} s")
    check_places(user)
    if not outside:
        check_without_compiler(user, deb, programs)
    examples = usable_examples(programs)
    check_tools(user, examples, programs, "install .* package of")
    if outside:
        os.kill(int(outside), signal.SIGCONT)
        expect(user.run("threadhist", "-p", outside, "1", "1", root=True), r"launches, 5 threads")
    elif "vectoradd" in examples:
        check_upgrade(user, deb, programs)
    apt("purge", "gpubpf")
    if left := our_files() - before:
        raise CheckError(f"purging left {', '.join(sorted(left))}")
    say("  fine")


if __name__ == "__main__":
    try:
        check_deb(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    except CheckError as error:
        say(str(error))
        sys.exit(1)
