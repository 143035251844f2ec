import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpubpf.errors import Error, UsageError
from gpubpf.show import cli, option_values

ALL = option_values.EVERYTHING


def full_parser():
    made = cli.parser("tool", "what it does", "examples:")
    for add in (
        cli.add_targets,
        cli.add_kernels,
        cli.add_threads,
        cli.add_device,
        cli.add_looks,
        cli.add_output,
    ):
        add(made)
    return made


def parse(*argv):
    return cli.parse(full_parser(), argv)


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as leaving:
        parse(*argv)
    assert leaving.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("tool: ") and message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("7", (7, 7)),
        ("2:5", (2, 5)),
        (":5", (0, 5)),
        ("3:", (3, option_values.LARGEST_INDEX)),
        ("*", ALL),
        ("0", (0, 0)),
    ],
)
def test_ranges_include_both_ends(text, meaning):
    assert option_values.parse_range(text) == meaning


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a number"),
        ("x", "is not a number"),
        ("5:2", "'5:2' is an empty range; write FIRST:LAST"),
        ("-1", "is not a number"),
        ("1:2:3", "is not a number"),
        ("4294967296", "'4294967296' is larger than 4294967295"),
        ("١", "is not a number"),
    ],
)
def test_what_is_no_range_is_refused(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        option_values.parse_range(text)


def test_dimensions_left_out_mean_everything():
    assert option_values.parse_ranges("3") == ((3, 3), ALL, ALL)
    assert option_values.parse_ranges("*,0:1") == (ALL, (0, 1), ALL)
    with pytest.raises(argparse.ArgumentTypeError):
        option_values.parse_ranges("1,2,3,4")


@pytest.mark.parametrize(
    ("text", "meaning"), [("3:5", (3, 5)), ("3:", (3, None)), (":5", (1, 5)), ("4", (4, 4)), (":", (1, None))]
)
def test_launches_count_from_one(text, meaning):
    assert option_values.parse_launches(text) == meaning


@pytest.mark.parametrize("text", ["0:3", "5:3", "a", ""])
def test_what_is_no_range_of_launches_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        option_values.parse_launches(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("256M", 2**28), ("1G", 2**30), ("4096", 4096), ("64k", 65536), ("2MiB", 2**21), ("3MB", 3 * 2**20)],
)
def test_sizes(text, size):
    assert option_values.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "0", "1.5G", "4X", "9999999999T"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        option_values.parse_size(text)


def test_everything_behind_the_dashes_is_the_commands():
    args = parse("1", "--json", "3", "--", "./app", "--help", "--", "-p")
    assert (args.interval, args.count, args.json) == (1.0, 3, True)
    assert args.command == ["./app", "--help", "--", "-p"]


def test_defaults_mean_everything():
    args = parse("--", "./app")
    assert (args.kernel, args.pid, args.launch, args.sample) == ([], [], (1, None), 1)
    assert args.block == args.thread == (ALL, ALL, ALL)
    assert (args.device, args.map_memory, args.interval, args.count) == ("auto", 2**28, None, None)
    assert parse().command is None


def test_only_results_go_to_standard_output_under_the_name_of_a_dash(capsys):
    assert parse("-o", "-").output is None and parse("-o", "a").output == "a"
    with pytest.raises(argparse.ArgumentTypeError):
        option_values.parse_file("-")
    assert option_values.parse_picture("a.SVG") == "a.SVG"
    with pytest.raises(argparse.ArgumentTypeError, match=r"^'a.txt' must end in .svg, .png or .pdf$"):
        option_values.parse_picture("a.txt")


def test_a_value_that_may_be_missing_comes_after_an_equals_sign():
    made = cli.parser("t", "", "")
    cli.add_targets(made)
    made.add_argument("--cupti", nargs="?", const="")
    args = cli.parse(made, ["--cupti", "1", "10"])
    assert (args.cupti, args.interval, args.count) == ("", 1.0, 10)
    args = cli.parse(made, ["--cupti=/lib.so", "2"])
    assert (args.cupti, args.interval) == ("/lib.so", 2.0)


def test_kernels_add_up_and_parsers_do_not_share_them():
    assert parse("--kernel", "a*", "--kernel", "b").kernel == ["a*", "b"]
    assert parse().kernel == []


def test_list_takes_files():
    assert parse("--list", "a.out", "b.so").files == ["a.out", "b.so"]
    assert parse("--ptx", "-p", "1,2").pid == [1, 2]


def test_command_lines_that_make_no_sense_are_one_line_and_status_two(capsys):
    assert "after '--'" in refused(capsys, "./app")
    assert "exclude" in refused(capsys, "-p", "1", "--", "./app")
    assert "COMMAND" in refused(capsys, "--")
    assert "one of FILEs" in refused(capsys, "--list", "a.out", "-p", "1")
    assert "need" in refused(capsys, "--list")
    assert "too many" in refused(capsys, "1", "2", "3")
    # Advice to put a command after '--' is for those who did not.
    for words in ["0"], ["./app"], ["1", "0"], ["1", "2", "3"]:
        assert "; put a command after '--'" in refused(capsys, *words)
        assert "put a command" not in refused(capsys, *words, "--", "./app")
    for words in ["0"], ["-d", "0"], ["-d", "x"]:
        assert f"must be a positive number of seconds, not '{words[-1]}'" in refused(capsys, *words)
    assert "--sampel" in refused(capsys, "--sampel", "3")
    refused(capsys, "--json", "--csv")
    refused(capsys, "--dev", "sim")  # no abbreviations: they would break when options are added
    refused(capsys, "-d", "0")
    refused(capsys, "-p", "abc")
    refused(capsys, "--device", "tpu")
    assert "\x1b" not in refused(capsys, "--x\x1b[31m")


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (
            Error("no kernel matches 'x'; kernels seen: y"),
            1,
            "tool: no kernel matches 'x'; kernels seen: y\n",
        ),
        (UsageError("odd; do not"), 2, "tool: odd; do not\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            ModuleNotFoundError("No module named 'numpy'", name="numpy"),
            1,
            f"the Python package numpy is missing in {sys.executable}; run ",
        ),
        (PermissionError(13, "Permission denied", "/dev/x"), 1, "/dev/x: Permission denied"),
        (Error("name \x1b[31m; rename"), 1, "tool: name \\x1b[31m; rename\n"),
    ],
)
def test_errors_become_one_line_and_a_status(capsys, error, status, says):
    with pytest.raises(SystemExit) as leaving, cli.errors("tool"):
        raise error
    assert leaving.value.code == status
    message = capsys.readouterr().err
    assert says in message and message.count("\n") <= 1


def test_an_interrupt_after_the_results_ends_the_tool_without_a_word():
    code = f"""
import signal, sys
sys.path.insert(0, {str(Path(cli.__file__).parents[2])!r})
from gpubpf.show import cli
sys.argv[0] = "/usr/local/bin/" + sys.argv[1]
with cli.errors("threadhist"):
    pass
signal.raise_signal(signal.SIGINT)
"""
    for name, quiet in (("threadhist", True), ("threadhist.py", True), ("other", False)):
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, timeout=60)
        assert (done.returncode, done.stderr == b"") == (-signal.SIGINT, quiet)


def test_an_interrupt_before_anything_is_measured_ends_the_tool_without_a_word():
    swallows = """
import signal
from gpubpf.show import cli
with cli.errors("tool"):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise ImportError("as NumPy says while it is being loaded") from error
"""
    done = subprocess.run([sys.executable, "-c", swallows], capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


ENDS = """
import atexit, sys, threading, time
from gpubpf.errors import Error
from gpubpf.show import cli

sys.argv[0] = "/usr/bin/tool.py"

class Told:
    def __del__(self):
        print("Python took itself apart", file=sys.stderr)

told = Told()

@cli.command("tool")
def main(argv=None):
    atexit.register(lambda: print("at exit"))
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    print("results")
    {end}

sys.exit(main())
"""
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("return 0", 0, ""),
        ("return 137", 137, ""),
        ("sys.exit(3)", 3, ""),
        ("raise Error('no device; look for one')", 1, "tool: no device; look for one\n"),
        ("raise BrokenPipeError", 0, ""),
    ],
)
def test_a_tool_ends_before_python_takes_itself_apart(end: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(end=end)],
        capture_output=True,
        text=True,
        timeout=50,
        env=BUFFERED,
    )
    printed = "" if "Pipe" in end else "results\nat exit\n"
    assert (done.returncode, done.stdout, done.stderr) == (status, printed, said)


def test_a_bug_in_a_tool_is_shown_with_its_traceback() -> None:
    code = ENDS.format(end="raise ZeroDivisionError")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "results\n" in done.stdout


def test_results_that_cannot_be_written_at_the_end_are_an_error() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", ENDS.format(end="return 0")]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=50, env=BUFFERED
        )
    assert done.returncode == 1
    assert done.stderr == "tool: cannot write the results: No space left on device\n"


def test_a_bug_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), cli.errors("tool"):
        raise ZeroDivisionError


def test_names_that_targets_chose_cannot_drive_the_terminal():
    assert cli.printable("plain äß 漢") == "plain äß 漢"
    assert cli.printable("a\x1b]0;title\x07\n\udcff") == "a\\x1b]0;title\\x07\\n\\udcff"


def test_notices_say_so(capsys):
    cli.note("tool", "attached to 1 (x\x07)")
    assert capsys.readouterr().err == "tool: note: attached to 1 (x\\x07)\n"


def test_a_terminal_gets_notices_wrapped_and_errors_in_one_line(monkeypatch):
    for terminal, lines in ((True, 3), (False, 1)):
        heard = io.StringIO()
        heard.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stderr", heard)
        cli.note("tool", "word " * 40)
        noted = heard.getvalue().splitlines()
        assert len(noted) == lines and noted[0].startswith("tool: note: word ")
        assert not terminal or max(map(len, noted)) <= 80
        cli.complain("tool", "word " * 40)
        assert len(heard.getvalue().splitlines()) == lines + 1


def test_results_go_to_the_file(tmp_path):
    out = cli.Output(str(tmp_path / "out"))
    out.line("a\x1b")
    out.record(type="x", n=1)
    out.records({"n": number} for number in range(5000))
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[:2] == ["a\\x1b", '{"type":"x","n":1}']
    assert [json.loads(line)["n"] for line in lines[2:]] == list(range(5000))


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(Error, match="cannot write"):
        cli.Output(str(tmp_path / "absent" / "out"))
    full = cli.Output("/dev/full")
    with pytest.raises(Error, match="No space left"):
        full.line("x")


def test_a_reader_that_leaves_ends_the_output_quietly():
    program = (
        "import sys\nfrom gpubpf.show import cli\nout = cli.Output()\n"
        "while not out.closed:\n    out.line('x' * 100)\nprint('closed', file=sys.stderr)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b"closed\n"
    assert child.wait() == 0


@pytest.mark.parametrize("option", ["--help", "--version"])
@pytest.mark.parametrize("buffering", ["", "1"])
def test_help_that_cannot_be_written_is_one_line(option, buffering):
    program = (
        "from gpubpf.show import cli\n"
        f"with cli.errors('tool'):\n    cli.parse(cli.parser('tool', 'what', ''), [{option!r}])\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": buffering},
        )
    assert done.returncode == 1
    assert done.stderr.startswith("tool: No space left") and done.stderr.count("\n") == 1


def test_standard_files_that_are_closed():
    program = (
        "import os, subprocess, sys\nfrom gpubpf.show import cli\n"
        "args = cli.parse(cli.parser('tool', 'what', ''), [])\n"
        "assert os.open('/dev/null', os.O_RDONLY) > 2\n"
        "assert subprocess.call(['sh', '-c', 'test ! -e /dev/fd/1'], close_fds=False) == 0\n"
        "with cli.errors('tool'):\n    cli.note('tool', 'heard by nobody')\n    cli.Output().line('x')\n"
    )
    for closed, said in (
        ("<&- >&-", "tool: cannot write the results: Bad file descriptor"),
        ("<&- >&- 2>&-", ""),
    ):
        shell = f'exec "$0" -c "$1" {closed}'
        done = subprocess.run(["sh", "-c", shell, sys.executable, program], capture_output=True, text=True)
        assert done.returncode == 1
        assert said in done.stderr and "Traceback" not in done.stderr


def test_output_takes_any_standard_output(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    cli.Output().line("ä")
    assert text.getvalue() == "ä\n"


def test_csv_has_no_formulas():
    """Processes choose their names, and spreadsheets evaluate cells. Numbers stay."""
    cells = [
        "=1+1",
        "+A1",
        "-A1",
        "@x",
        '=HYPERLINK("a,b")',
        "\t=1",
        "a=1",
        "-5",
        -5,
        "-1.5e3",
        "+3",
        "-inf",
        "",
    ]
    expected = """'=1+1,'+A1,'-A1,'@x,"'=HYPERLINK(""a,b"")",\\t=1,a=1,-5,-5,-1.5e3,+3,-inf,"""
    assert cli.csv_cells(cells) == expected


def test_csv_cells_are_quoted_where_they_must_be():
    assert cli.csv_cells([1, (2, 3), "a,b", 'say "x"', "\x1b\n"]) == '1,2,3,"a,b","say ""x""",\\x1b\\n'


def summary(**changed):
    counts = {
        "launches_seen": 30,
        "launches_matched": 25,
        "launches_instrumented": 25,
        "not_instrumented": {},
        "lost": 0,
    }
    return counts | changed


def test_every_report_ends_with_what_was_not_seen():
    assert cli.summary_lines(summary()) == ["counted 25 of 25 matching launches (30 in total)"]
    lines = cli.summary_lines(
        summary(launches_instrumented=20, not_instrumented={"capture": 1, "map too small": 4}, lost=7)
    )
    assert lines[0].startswith("counted 20 of 25 matching launches")
    assert lines[1:3] == [
        "  not counted: 4 (map too small; increase --map-memory)",
        "  not counted: 1 (capture)",
    ]
    events = summary(
        launches_instrumented=15,
        launches_timed={"device": 15, "stamp": 4},
        not_instrumented={"before ready": 6, "filtered": 4},
    )
    assert cli.summary_lines(events) == [
        "counted 19 of 25 matching launches (30 in total)",
        "  no probe: 6 (before ready)",
        "  of these, timing events timed 4",
        "  not counted: 4 (filtered)",
    ]
    assert lines[3:] == [
        "lost: 7 (a map was full, an update timed out, a kernel failed, or a program",
        "  ended early)",
    ]
    unseen = {"tex": 2, "cp.async.bulk.tensor": 1}
    assert cli.summary_lines(summary(launches_by_others=25)) == [
        "counted 0 of 25 matching launches (30 in total)",
        "  not counted: 25 (by threads that -t, --comm or --cgroup leaves out)",
    ]
    assert cli.summary_lines(summary(launches_unread=3)) == [
        "counted at least 22 of 25 matching launches (30 in total)",
        "  not counted: up to 3 (the program ended before its counts were read)",
    ]
    assert cli.summary_lines(summary(not_probed=unseen))[1:] == [
        "not probed: tex (2 instructions), cp.async.bulk.tensor (1 instruction)"
    ]
    assert cli.summary_lines(summary(not_probed={})) == cli.summary_lines(summary())
    assert cli.summary_lines(summary(launches_unknown=5))[1].startswith(
        "unknown kernels: 5 launches of kernels loaded before"
    )
    told = cli.summary_lines(
        summary(
            graphs_before=3,
            processes={
                "measured": 2,
                "missed": {"ended": 1, "reached late": 2, "no CUDA driver": 7},
                "unmeasured_ns": {"ended": 2_000_000, "reached late": 84_000_000},
            },
        )
    )
    assert told[1:] == [
        "graphs created before attaching: 3 launches; their kernels are unknown and not",
        "  counted",
        "processes measured: 2; missed: 7 (no CUDA driver), 2 (reached late), 1 (ended)",
        "  at most 86.0 ms of their time was not measured; its launches are unknown",
    ]
    told = cli.summary_lines(summary(processes={"measured": 2, "missed": {"no CUDA driver": 7}}))
    assert told[1:] == ["processes measured: 2; missed: 7 (no CUDA driver)"]
    assert cli.summary_lines(summary(processes={"measured": 2, "missed": {}}))[1] == "processes measured: 2"
    told = cli.summary_lines(summary(processes={"measured": 1, "programs": 2, "missed": {"ended": 1}}))
    assert told[1] == "processes measured: 1, which executed 2 programs; missed: 1 (ended)"
    assert cli.summary_lines(summary(launches_seen=0)) == ["counted nothing"]
    nothing = summary(launches_matched=0, launches_instrumented=0)
    assert cli.summary_lines(nothing)[0] == "counted nothing of 30 launches"


def overhead(**changed):
    costs = {"hooks": 26, "hooks_ns": 232_000_000, "registers": 6, "drained_bytes": 4096, "stood_ns": 0}
    return cli.summary_lines(summary(overhead=costs | changed))[1:]


def test_the_overhead_is_one_line():
    assert overhead() == [
        "overhead: about 26 hooked calls, 232 ms; up to 6 extra registers per kernel;",
        "  4.00 KB read",
    ]
    assert overhead(hooks=1, hooks_ns=None, registers=1, drained_bytes=0, stood_ns=2_000_000) == [
        "overhead: about 1 hooked call; up to 1 extra register per kernel; threads",
        "  stopped for 2.00 ms",
    ]
    assert overhead(hooks=None, hooks_ns=0, registers=0, drained_bytes=None) == [
        "overhead: no time on the virtual clock; no extra registers per kernel"
    ]
    assert overhead(hooks=0, registers=None, drained_bytes=0) == ["overhead: no hooked calls"]


def test_a_signal_while_results_are_written_loses_none_of_them():
    program = """
import signal, sys
from gpubpf.show.cli import Output
signal.signal(signal.SIGINT, lambda number, frame: None)
print("ready", file=sys.stderr, flush=True)
Output().write(b"0123456\\n" * 50000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stderr.readline()
        time.sleep(0.3)  # the pipe is full, and nobody reads
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        written, _ = process.communicate(timeout=60)
    assert written == b"0123456\n" * 50000


def test_a_package_that_cannot_be_loaded_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """NumPy explains at length what it does not know, for example that no more files can be opened."""
    with pytest.raises(SystemExit) as ended, cli.errors("tool"):
        raise ImportError("\n\nIMPORTANT: read this!\n\nOriginal error was: cannot import datetime\n")
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "tool: a Python package cannot be loaded: Original error was: cannot import datetime;"
        " raise the limit on open files (ulimit -n) if it is low, or run script/setup\n"
    )


def test_how_long_host_programs_ran_fits_a_terminal() -> None:
    programs = {
        "call_entry.call_return": {"runs": 12_897, "mean_ns": 198},
        "launch": {"runs": 1, "mean_ns": 7},
    }
    assert cli.host_program_lines({"host_programs": programs}) == [
        "host program call_entry.call_return: 12,897 runs in the Linux kernel, 198 ns",
        "  each",
        "host program launch: 1 run in the Linux kernel, 7 ns each",
    ]
