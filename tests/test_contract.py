"""What every tool promises, whatever it measures."""

import importlib
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gpubpf.__main__
import manpages
from gpubpf import embedded
from gpubpf.ebpf import headers

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = sorted(path.stem for path in (REPOSITORY / "tools").glob("*.py"))
COMMANDS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
NEVER_FOR_HELP = (
    "numpy",
    "frida",
    "bcc",
    "llvmlite",
    "elftools",
    "tabulate",
    "argcomplete",
    "cuda",
    "lz4",
    "zstandard",
)
DEVICES = ("cudasim", "hipsim")  # commands that run a program on an embedded device
CHECKER = "gpubpf"  # has subcommands; tests/gpubpf/check has more about it


def tool_module(name):
    if str(REPOSITORY / "tools") not in sys.path:
        sys.path.insert(0, str(REPOSITORY / "tools"))
    return importlib.import_module(name)


def man_page(name):
    """The page as text, without groff's marks."""
    return (
        re.sub(r"\\f[BRIP]", "", manpages.page(name))
        .replace("\\-", "-")
        .replace("\\(aq", "'")
        .replace("\\ ", " ")
    )


def section(name, title):
    return man_page(name).split(f".SH {title}\n")[1].split("\n.SH ")[0]


def run(tool, *arguments, **environment):
    command = [sys.executable, REPOSITORY / "tools" / f"{tool}.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=60)


def option_strings(tool):
    for action in tool_module(tool).build_parser()._actions:
        yield from action.option_strings


def test_tools_commands_pages_examples_and_completions_are_one_set():
    assert TOOLS
    assert {name: target for name, target in COMMANDS.items() if name not in DEVICES} == {
        CHECKER: "gpubpf.__main__:main",
        **{tool: f"gpubpf.tools.{tool}:main" for tool in TOOLS},
    }
    both = {*TOOLS, *DEVICES, CHECKER}
    assert set(manpages.names()) == both
    assert {path.name for path in (REPOSITORY / "completions").iterdir()} == both
    assert {path.stem for path in (REPOSITORY / "tools").glob("*.txt")} == {
        f"{tool}_example" for tool in TOOLS
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_help_needs_nothing_heavy(tool):
    # An import of any of these would fail here.
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in NEVER_FOR_HELP)
    program = f"import sys, runpy\n{blocked}sys.argv = [{tool!r}, '--help']\n"
    program += f"runpy.run_path({str(REPOSITORY / 'tools' / f'{tool}.py')!r}, run_name='__main__')\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ") and "examples:" in done.stdout
    assert "However a program ends, the report has what was measured until then." in done.stdout


@pytest.mark.parametrize("tool", TOOLS)
def test_help_fits_a_terminal(tool):
    done = run(tool, "--help", COLUMNS="80")
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert "[LIBRARY]" not in done.stdout or "--cupti[=LIBRARY]" in done.stdout
    if tool in ("cudasnoop", "hipsnoop"):
        from gpubpf.calls.api import GROUPS

        assert f"or a group: {', '.join(GROUPS)};" in " ".join(done.stdout.split())


@pytest.mark.parametrize("tool", TOOLS)
def test_prose_of_the_example_text_fits_a_terminal(tool):
    text = (REPOSITORY / "tools" / f"{tool}_example.txt").read_text()
    wide = [line for line in text.splitlines() if len(line) > 80 and not line.startswith(("{", "#"))]
    assert wide == []


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("module", ["argparse", "locale"])  # loaded with the tool; loaded by its `main`
def test_ctrl_c_while_a_tool_starts_ends_it_without_a_word(tool, module, tmp_path):
    (tmp_path / f"{module}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tools" / f"{tool}.py", "--help"],
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.every(3)
@pytest.mark.parametrize("tool", TOOLS)
def test_help_is_quick(tool):
    """Its work is compared with Python's own start, in CPU time: on a busy machine, both take longer."""

    def work(*command):
        times = []
        for _ in range(7):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        return min(times)

    help_text = work(sys.executable, REPOSITORY / "tools" / f"{tool}.py", "--help")
    assert help_text < 5 * work(sys.executable, "-c", "pass")


@pytest.mark.parametrize("tool", TOOLS)
def test_every_option_is_in_the_man_page_and_the_other_way_round(tool):
    options = set(option_strings(tool))
    documented = section(tool, "OPTIONS")
    described = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", documented)) - {"--"}
    assert options <= described
    # Options may be mentioned outside, but nothing may be described that is not there.
    assert described <= options


def read_command_line(tool, words):
    """Read a command line as the tool does, with the SPECs in it. Raises if it is wrong."""
    from gpubpf.expressions import specs
    from gpubpf.show import cli

    args = cli.parse(tool_module(tool).build_parser(), words)
    looks = cli.Options.of(args).looks
    kinds = {"gpucount": specs.count, "gputrace": specs.trace}
    if tool == "gpudist":
        assert tool_module(tool).distributions_of(args.kinds, args.specs, args.width, looks)
    elif tool in kinds:
        assert specs.read(args.specs, looks, kinds[tool])


@pytest.mark.parametrize("tool", TOOLS)
def test_the_examples_of_the_help_are_command_lines_that_the_tool_takes(tool):
    examples = [line.strip() for line in tool_module(tool).EXAMPLES.splitlines()]
    examples = [line for line in examples if line.startswith(f"{tool} ")]
    assert len(examples) >= 6
    for example in examples:
        read_command_line(tool, shlex.split(re.split(r"\s{3,}", example)[0])[1:])


@pytest.mark.parametrize("name", manpages.names())
def test_the_examples_of_the_man_page_run_as_a_terminal_shows_them(name):
    if shutil.which("groff") is None:
        pytest.skip("needs groff")
    command = ["groff", "-man", "-Tutf8", "-rLL=78n", "-P-cbou"]  # as man in 80 columns, without colours
    done = subprocess.run(command, input=manpages.page(name), capture_output=True, text=True, check=True)
    shown = done.stdout.split("\nEXAMPLES\n")[1].split("\nOVERHEAD\n")[0].splitlines()
    examples = [line.strip() for line in shown if line.startswith(" " * 14)]
    titles = [line for line in shown if line.strip() and not line.startswith(" " * 14)]
    assert len(examples) == len(titles) >= (2 if name in DEVICES else 6)
    assert all(len(title) <= 78 for title in titles)
    for example in examples:
        words = shlex.split(example)
        while re.fullmatch(r"[A-Z_]+=\w+", words[0]):  # the environment
            words.pop(0)
        assert words.pop(0) == name
        if name in DEVICES:
            own, command = words[: words.index("--")], words[words.index("--") + 1 :]
            embedded.build_parser(importlib.import_module(f"{name}.launcher").DEVICE).parse_args(own)
            assert command == ["./app"]
        elif name == CHECKER:
            gpubpf.__main__.build_parser().parse_args(words)
        else:
            read_command_line(name, words)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_man_page_has_its_sections_and_no_mistakes(tool):
    page = man_page(tool)
    for title in (
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "REQUIREMENTS",
        "OPTIONS",
        "FIELDS",
        "EXAMPLES",
        "OVERHEAD",
    ):
        assert f"\n.SH {title}\n" in page
    for title in ("EXIT STATUS", "THE END OF A PROCESS", "SEE ALSO"):
        assert f'\n.SH "{title}"\n' in page


@pytest.mark.parametrize("name", manpages.names())
def test_groff_formats_the_man_page_without_warnings(name):
    if shutil.which("groff") is None:
        pytest.skip("needs groff")
    page = manpages.page(name)
    done = subprocess.run(["groff", "-man", "-ww", "-Tutf8"], input=page, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n\n" not in page  # an empty line would show


def test_every_fragment_of_man_pages_is_used():
    sources = [*manpages.MAN.glob("*/*")]
    included = set(
        re.findall(r"^\.so fragments/(.*)$", "".join(path.read_text() for path in sources), re.MULTILINE)
    )
    assert included == {path.name for path in manpages.MAN.glob("fragments/*")}


def test_a_man_page_shows_from_the_checkout():
    if shutil.which("man") is None:
        pytest.skip("needs man")
    done = subprocess.run(["man", "-M", manpages.MAN, "cudasim"], capture_output=True, text=True)
    assert done.returncode == 0 and "CUDASIM(8)" in done.stdout and not done.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_version(tool):
    from gpubpf import __version__

    done = run(tool, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert tool in done.stdout and __version__ in done.stdout


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "arguments", [["--no-such-option"], ["-p", "0"], ["--"], ["-d", "x"], ["./app"], ["--json", "--csv"]]
)
def test_bad_command_lines_are_one_line_and_status_two(tool, arguments):
    needed = ["OBJECT"] if tool_module(tool).build_parser().operand else []
    done = run(tool, *needed, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{tool}: ") and done.stderr.count("\n") == 1


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "words",
    [
        *("threadhist", "kernelretsnoop", "kernelretsnoop -e", "launchlate", "memtrace", "memtrace -e"),
        *(
            "memtrace --sample-warps 1/2",
            "nansnoop",
            "warpdiv",
            "barrierlate",
            "gpumem",
            "gpuprofile",
            "gputop",
            "gpuhang",
            "gpucount exit:*",
            "gpudist -C exit:*:u64:launch",
            "gputrace -T exit:*",
        ),
    ],
)
def test_csv_has_a_header_if_no_kernel_was_launched(words):
    done = run(*words.split(), "--csv", "--device", "sim", "--", "true")
    assert done.returncode == 0
    (header,) = done.stdout.splitlines()
    assert {"pid", "comm", "gpu"} <= set(header.split(",")), done.stderr


@pytest.mark.parametrize(
    "name, others",
    [
        ("README.md", ()),
        ("CHANGELOG.md", ()),
        ("docs/architecture.md", ()),
        ("docs/tools/index.md", ()),
        ("docs/amd.md", ("cudasnoop",)),
        ("lib/gpubpf/check/process.py", ()),
        ("packaging/debian/control", ()),
        ("script/packaging_checks.py", ()),
        ("script/promises.py", ()),
        ("tests/test_every_look.py", ()),
        (".github/ISSUE_TEMPLATE/bug_report.yml", ()),
    ],
)
def test_every_list_of_all_tools_has_the_tool(name, others):
    """others: tools that the list rightly lacks."""
    words = set(re.findall(r"\w+", (REPOSITORY / name).read_text()))
    assert set(TOOLS) - set(others) <= words, "CONTRIBUTING.md, Add a tool, names all such lists"


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if hasattr(tool_module(tool), "PROGRAM")])
def test_ebpf_prints_the_program(tool):
    done = run(tool, "--ebpf")
    assert done.returncode == 0
    text = tool_module(tool).PROGRAM
    assert done.stdout.strip() in (text.strip(), headers.self_contained(text).strip())


@pytest.mark.parametrize("tool", TOOLS)
def test_the_script_reads_as_one(tool):
    path = REPOSITORY / "tools" / f"{tool}.py"
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env python3" and lines[1] == "# PYTHON_ARGCOMPLETE_OK"
    program = getattr(tool_module(tool), "PROGRAM", "")  # is what it measures
    script = len(lines) - len(program.splitlines())
    assert script <= 280, "what of it belongs in the library?"
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_example_text_shows_real_options(tool):
    text = (REPOSITORY / "tools" / f"{tool}_example.txt").read_text()
    assert text.startswith("Demonstrations of")
    commands = re.findall(rf"^\s*(?:\$|#) (?:sudo )?{tool}((?: .*)?)$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        own = shlex.split(command.split(" -- ")[0])
        unknown = {word for word in own if word.startswith("-")} - set(option_strings(tool))
        assert not unknown


@pytest.mark.parametrize("tool", [*TOOLS, *DEVICES])
def test_completion_completes_options_and_commands(tool):
    if subprocess.run(["bash", "-c", "test -e /usr/share/bash-completion/bash_completion"]).returncode:
        pytest.skip("bash-completion is not installed")
    script = f"""
        . /usr/share/bash-completion/bash_completion
        . '{REPOSITORY}/completions/{tool}'
        complete -p {tool}
        COMP_WORDS=({tool} -- ech); COMP_CWORD=2; COMP_LINE='{tool} -- ech'; COMP_POINT=${{#COMP_LINE}}
        _gpubpf {tool} ech --
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert f"_gpubpf {tool}" in done.stdout
    assert "echo" in done.stdout.split()


@pytest.mark.parametrize(
    ("tool", "begun", "whole"),
    [*((tool, "ver", "version") for tool in TOOLS), *((device, "clo", "clock") for device in DEVICES)],
)
def test_options_complete(tool, begun, whole, tmp_path):
    pytest.importorskip("argcomplete")
    line = f"{tool} --{begun}"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    environment |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words")}
    program = f"from {COMMANDS[tool].replace(':', ' import ')}; main()"
    subprocess.run([sys.executable, "-c", program], env=os.environ | environment, timeout=60)
    assert (tmp_path / "words").read_text().split() == [f"--{whole}"]
