"""The commands that README promises."""

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

from gpubpf import elf

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = ("common", "demo", "packages", "release", "setup", "test")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script):
    done = subprocess.run(["bash", "-n", REPOSITORY / "script" / script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_names_the_scripts_there_are():
    readme = (REPOSITORY / "README.md").read_text()
    for script in ("demo", "test"):
        assert f"    script/{script} " in readme
        assert os.access(REPOSITORY / "script" / script, os.X_OK)


def test_ci_runs_script_test_and_nothing_else():
    lines = (REPOSITORY / ".ci/run").read_text().splitlines()
    assert lines[0] == "#!/bin/sh" and len(lines) == 2 and lines[1].endswith('/../script/test"')


def test_an_empty_environment_will_do():
    done = subprocess.run(
        ["/bin/bash", "-c", f"source '{REPOSITORY}/script/common'; printenv PATH"],
        env={},
        capture_output=True,
    )
    assert done.returncode == 0 and b"/usr/bin" in done.stdout


@pytest.mark.parametrize("name", ["venv", "a venv"])
def test_installed_commands_run_no_code_of_others(tmp_path, name):
    """As root, HOME and PYTHONPATH may be those of another user. The venv sees the system's packages, as that of script/setup."""
    prefix = tmp_path / name
    venv.create(prefix, system_site_packages=True, symlinks=True)
    python = f"{prefix}/bin/python3"
    first = f"#!{python}\n" if " " not in name else f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
    command = prefix / "bin" / "command"
    command.write_text(f"{first}import sys\nprint(sys.prefix, *sys.argv[1:])\n")
    command.chmod(0o755)
    taken = tmp_path / "taken"
    bad = f"open({str(taken)!r}, 'w')\n"
    home = tmp_path / "home"
    site = home / ".local/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (site / "bad.pth").write_text(f"import os; {bad}")
    (home / "sitecustomize.py").write_text(bad)
    others = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(home)}

    def run():
        done = subprocess.run([command, "a b"], env=others, capture_output=True, text=True, check=True)
        assert done.stdout == f"{prefix} a b\n"
        return taken.exists()

    assert run()  # so pip leaves it
    taken.unlink()
    isolate = ["bash", "-c", 'source "$1"; isolate "$2"', "-", REPOSITORY / "script/common", command]
    for _ in range(2):  # a second time changes nothing
        subprocess.run(isolate, check=True)
        assert not run() and "-I -I" not in command.read_text()


def test_headers_may_be_in_a_directory_with_spaces(tmp_path):
    (tmp_path / "cuda headers").mkdir()
    (tmp_path / "cuda headers/cuda.h").touch()
    for part in ("lib/cudasim", "lib/gpubpf/agent"):
        command = ["make", "--dry-run", "-C", REPOSITORY / part, f"CUDA_INCLUDE={tmp_path}/cuda headers"]
        done = subprocess.run([*command, "--always-make"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f'-isystem "{tmp_path}/cuda headers"' in done.stdout


# What setup.py would install, when nothing is built yet, and then with a library as make leaves it: a file, and a link to it.
PACKAGED = """
import json, os, setuptools
from distutils.core import run_setup
made = run_setup('setup.py', stop_after='config')
open('lib/cudasim/lib/libcuda.so.1', 'w').close()
os.symlink('libcuda.so.1', 'lib/cudasim/lib/libcuda.so')
build, wheel = made.get_command_obj('build_py'), made.get_command_obj('bdist_wheel')
build.ensure_finalized()
wheel.ensure_finalized()
print(json.dumps({
    'packages': made.packages,
    'shared': [file for _, files in made.data_files for file in files],
    'data': [f'{package}/{file}' for package, _, _, files in build.data_files for file in files],
    'tag': wheel.get_tag(),
    'needs': made.install_requires,
    'description': made.metadata.long_description,
}))
"""


def test_what_is_in_a_wheel(tmp_path):
    built = shutil.ignore_patterns("build", "__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY / "lib", tmp_path / "lib", ignore=built)
    for part in ("cudasim", "gpubpf/agent", "gpubpf/calls/device_times"):
        shutil.rmtree(tmp_path / "lib" / part / "lib", ignore_errors=True)
    for directory in ("man", "completions"):
        shutil.copytree(REPOSITORY / directory, tmp_path / directory)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, tmp_path)
    done = subprocess.run([sys.executable, "-c", PACKAGED], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    libraries = {"cudasim.lib", "gpubpf.agent.lib", "gpubpf.calls.device_times.lib"}
    assert {*libraries, "cudasim.src", "gpubpf.ebpf.prebuilt"} <= {*made["packages"]}
    assert {"build/man/threadhist.8", "completions/threadhist"} <= {*made["shared"]}
    assert {"cudasim.src/device_runtime.h", "gpubpf.ebpf.prebuilt/threadhist.json"} <= {*made["data"]}
    # Links become copies.
    assert [file for file in made["data"] if file.startswith("cudasim.lib/")] == ["cudasim.lib/libcuda.so.1"]
    assert made["tag"][:2] == ["py3", "none"]
    assert not [line for line in made["needs"] if re.match("pyarrow|matplotlib|ziglang|nvidia", line)]
    links = re.findall(r"\]\(([^)]*)\)", made["description"])
    assert links and all(link.startswith("https://") for link in links)  # PyPI has no other file of ours


def test_libraries_are_installed_without_debug_information(tmp_path):
    """Its build-id, which leads a debugger to it, stays. The library that make built keeps it."""
    for directory in ("lib", "man", "completions"):
        (tmp_path / directory).mkdir()
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, tmp_path)
    (tmp_path / "lib/gpubpf").mkdir()
    shutil.copy(REPOSITORY / "lib/gpubpf/__init__.py", tmp_path / "lib/gpubpf")
    agent = REPOSITORY / "lib/gpubpf/agent/lib/libgpubpf-agent.so"
    installed = tmp_path / "built" / agent.name
    installed.parent.mkdir()
    shutil.copy(agent, installed)
    program = (
        "from distutils.core import run_setup\nimport setuptools\n"
        "build = run_setup('setup.py', stop_after='config').get_command_obj('build_py')\n"
        "build.build_lib = 'built'\nbuild.strip_libraries()"
    )
    parts = [
        tmp_path / part
        for part in ("lib/cudasim", "lib/hipsim", "lib/gpubpf/agent", "lib/gpubpf/calls/device_times")
    ]
    for part in parts:
        part.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, stripped = (elf.of_bytes(path.read_bytes()).sections for path in (agent, installed))
    assert ".debug_line" in {section.name for section in kept}
    assert not [section.name for section in stripped if section.name.startswith((".debug", ".symtab"))]
    assert ".note.gnu.build-id" in {section.name for section in stripped}


def packages(tmp_path: Path, installed: str, program: str) -> subprocess.CompletedProcess:
    """Run a program with the functions of script/packages. `installed`: a pattern of sh for the packages that are installed."""
    fake = tmp_path / "bin"
    fake.mkdir()
    for directory in ("/usr/bin", "/bin"):
        for file in Path(directory).iterdir():
            if not file.name.startswith("clang") and not (fake / file.name).is_symlink():
                (fake / file.name).symlink_to(file)
    (fake / "dpkg-query").unlink(missing_ok=True)
    (fake / "dpkg-query").write_text(
        f'#!/bin/sh\nfor name; do :; done\ncase "$name" in {installed}) ;; *) exit 1 ;; esac\n'
        'case "$name" in clang*) echo "installed clang-15" ;; *) printf installed ;; esac\n'
    )
    (fake / "dpkg-query").chmod(0o755)
    start = f"set -euo pipefail; source '{REPOSITORY}/script/common'; source script/packages; log={tmp_path}/log\n"
    return subprocess.run(
        ["bash", "-c", start + program], env={"PATH": str(fake)}, capture_output=True, text=True
    )


def test_examples_find_the_compilers_that_setup_installed(tmp_path: Path) -> None:
    """They are on nobody's PATH. A toolkit in its usual place comes first."""
    (tmp_path / "examples").mkdir()
    shutil.copy(REPOSITORY / "examples/Makefile", tmp_path / "examples")
    for name in ("vectoradd.cu", "check.h", "threads.bpf.c"):
        (tmp_path / "examples" / name).touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/nvcc").touch()

    def compiler(*arguments: str) -> str:
        command = ["make", "-n", "-C", tmp_path / "examples", "--no-print-directory", *arguments]
        done = subprocess.run(
            command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
        )
        return done.stdout.split()[0]

    assert re.fullmatch(r"(/usr/local/cuda\S*|\.\./\.venv|/usr)/bin/nvcc", compiler("vectoradd"))
    assert compiler("vectoradd", "NVCC=/mine/nvcc") == "/mine/nvcc"


@pytest.mark.skipif(os.path.exists("/opt/rocm"), reason="AMD's own ROCm is installed")
def test_an_ordinary_user_is_told_everything_to_ask_root_for(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    done = packages(tmp_path / "none", "no-package", "ask_root")
    assert done.returncode == 1  # nothing works without them
    (command,) = re.findall(r"setup: +(apt-get update && apt-get install .*)", done.stderr)
    names = set(command.split()[5:])
    assert {"python3-venv", "g++", "make", "liblz4-dev", "libzstd-dev", "hipcc", "libamdhip64-dev"} <= names
    assert names & {"clang", "clang-15"}  # version 14 is too old
    assert re.search(r"without clang\S*: gpucount, gpudist and gputrace do not work", done.stderr)
    assert "hipsim does not work" in done.stderr
    (tmp_path / "five").mkdir()
    done = packages(tmp_path / "five", "python3-venv|g++|make|lib*4-dev|libzstd-dev", "ask_root")
    assert done.returncode == 0 and "gpucount" in done.stderr and "nothing works" not in done.stderr
    (tmp_path / "all").mkdir()
    done = packages(tmp_path / "all", "*", "ask_root")
    assert (done.returncode, done.stderr) == (0, "")


def test_setup_counts_the_files_that_it_compiles(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.mkdir()
    recipe = "@sh -c 'sleep 0.7; touch $@'"
    (part / "Makefile").write_text(
        f".PHONY: all\nall: a.o b.o c.o\n%.o:\n\t{recipe}\nbad.o:\n\t@sh -c 'echo why; exit 3'\n"
    )
    make = f"PROGRESS_EVERY=0 compile_part {part} make --silent -C {part}"
    done = packages(tmp_path, "*", f"{make}\necho again >&2\n{make}\n{make} bad.o || cat $log")
    first, again = done.stderr.split("again\n")
    said = first.splitlines()
    assert said[0] == f"setup: building {part}: files to compile: 3" and "setup: file 1 of 3" in said
    assert all(re.fullmatch(r"setup: file [123] of 3", line) for line in said[1:])
    assert (
        again == f"setup: building {part}: files to compile: 1\n" and "why" in done.stdout
    )  # the second time, there was nothing to do


def test_setup_takes_libraries_of_the_wheel_of_its_version_while_cpp_is_unchanged(tmp_path: Path) -> None:
    """The wheel lies in a directory that pip looks into."""
    checkout, wheel = tmp_path / "checkout", tmp_path / "gpubpf-7.8-py3-none-any.whl"
    source = checkout / "lib/cudasim/a.cpp"
    names = ("cudasim/lib/libcuda.so.1", "gpubpf/agent/lib/libgpubpf-agent.so")
    with zipfile.ZipFile(wheel, "w") as made:
        for name in names:
            made.writestr(name, "built")
        info = "gpubpf-7.8.dist-info"
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gpubpf\nVersion: 7.8\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    for path, text in ((source, "int a;"), (checkout / "lib/gpubpf/__init__.py", '__version__ = "7.8"\n')):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (checkout / ".gitignore").write_text("*.so*\n")
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "venv/bin/python").chmod(0o755)
    who = "-c user.name=a -c user.email=a@example.org"
    commit = f"git init -q && git add . && git {who} commit -q -m a"

    def taken(before: str = "true") -> list[bool]:
        script = f"""say() {{ echo "setup: $*"; }}
source '{REPOSITORY}/script/packages'
cd {checkout}
VENV={tmp_path}/venv; {before}; prebuilt "$(mktemp -d)" && echo taken"""
        variables = {
            **os.environ,
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_NO_INDEX": "1",
            "TMPDIR": str(tmp_path),
        }
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=variables)
        assert ("taken" in done.stdout) == ("wheel of version 7.8" in done.stdout) == (done.returncode == 0)
        found = [(checkout / "lib" / name).exists() for name in names]
        assert set(found) == {done.returncode == 0}, done.stderr
        return found

    assert not any(taken(commit))  # this version is not tagged
    assert all(taken("git tag v7.8"))
    assert os.readlink(checkout / "lib/cudasim/lib/libcuda.so") == "libcuda.so.1"
    for name in names:
        (checkout / "lib" / name).unlink()
    assert not any(taken("echo 'int b;' > lib/cudasim/b.cpp"))
    assert not any(taken(f"git add . && git {who} commit -q -m b"))


def test_setup_refuses_what_it_does_not_know():
    done = subprocess.run([REPOSITORY / "script/setup", "--no-such"], capture_output=True, text=True)
    assert done.returncode == 2 and "script/setup --dev" in done.stdout


@pytest.mark.skipif(
    "GPUBPF_SET_UP" not in os.environ, reason="script/setup has not just run (script/test says so)"
)
def test_a_second_setup_has_nothing_to_do_and_says_nothing():
    start = time.monotonic()
    done = subprocess.run([REPOSITORY / "script/setup"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - start < 20


def test_names_that_scripts_take_from_the_library_exist() -> None:
    """No type checker sees these files, and some run only where there is a GPU."""
    missing = []
    scripts = [*REPOSITORY.glob("benchmarks/*.py"), *REPOSITORY.glob("script/**/*.py")]
    for file in (*scripts, REPOSITORY / "benchmarks/run", REPOSITORY / "script/gpu-check"):
        tree = ast.parse(file.read_text())
        modules: dict[str, object] = {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("gpubpf."):
                continue
            package = importlib.import_module(node.module or "")
            for alias in node.names:
                if (
                    importlib.util.find_spec(f"{node.module}.{alias.name}")
                    if hasattr(package, "__path__")
                    else None
                ):
                    modules[alias.asname or alias.name] = importlib.import_module(
                        f"{node.module}.{alias.name}"
                    )
                elif not hasattr(package, alias.name):
                    missing.append(f"{file.name}:{node.lineno} {node.module}.{alias.name}")
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (module := modules.get(node.value.id)) is not None
                and not hasattr(module, node.attr)
            ):
                missing.append(f"{file.name}:{node.lineno} {node.value.id}.{node.attr}")
    assert not missing


def test_the_demo_asks_for_functions_that_exist() -> None:
    from gpubpf.kernel import privileges
    from gpubpf.traced import device

    modules = {"privileges": privileges, "device": device}
    asked = re.findall(
        r"ask '[^']*?\b(privileges|device)\.(\w+)\(", (REPOSITORY / "script" / "demo").read_text()
    )
    assert {module for module, _ in asked} == set(modules)
    assert [name for module, name in asked if not callable(getattr(modules[module], name, None))] == []


def test_the_demo_shows_the_cuda_part_before_the_amd_part_is_built() -> None:
    """The first tools run after `setup --cuda`. What needs HIP waits for the rest."""
    lines = (REPOSITORY / "script/demo").read_text().splitlines()
    setups = [line.strip() for line in lines if '"$setup"' in line and "source" not in line]
    assert setups == ['"$setup" --cuda', 'nice "$setup" --amd >/dev/null 2>&1 &', '"$setup"']
    called = [number for number, line in enumerate(lines) if line.strip() == "finish_setup"]
    runs = {
        tool: number
        for tool in ("threadhist", "hipsnoop")
        for number, line in enumerate(lines)
        if line.strip().startswith(f"run {tool} ")
    }
    assert len(called) == 2 and runs["threadhist"] < called[0] < runs["hipsnoop"]


@pytest.mark.parametrize("without", ["", "1"])
def test_the_package_is_built_without_the_amd_part_if_asked(tmp_path: Path, without: str) -> None:
    """script/setup --cuda asks. A make that only writes down what it is to do stands in for the compilers."""
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin/make"
    make.write_text('#!/bin/sh\nprintf "%s\\n" "$*" >>"$MADE"\n')
    make.chmod(0o755)
    parts = ("lib/cudasim", "lib/hipsim", "lib/gpubpf/agent", "lib/gpubpf/calls/device_times")
    for directory in (*parts, "man", "completions"):
        (tmp_path / directory).mkdir(parents=True)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, tmp_path)
    shutil.copy(REPOSITORY / "lib/gpubpf/__init__.py", tmp_path / "lib/gpubpf")
    program = "from distutils.core import run_setup\nimport setuptools\nrun_setup('setup.py', ['-q', 'build_py', '-d', 'built'])"
    variables = {
        **os.environ,
        "PATH": f"{make.parent}:{os.environ['PATH']}",
        "MADE": str(tmp_path / "made"),
        "WITHOUT_AMD": without,
    }
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "made").read_text()
    assert "-C lib/cudasim all" in made
    assert ("-C lib/gpubpf/agent all" in made) == ("-C lib/hipsim all" in made) == (not without)
    assert ("-C lib/gpubpf/agent lib/libgpubpf-agent.so" in made) == bool(without)
