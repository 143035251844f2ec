"""The names of pods and containers, from directories as the kubelet fills them."""

from __future__ import annotations

from pathlib import Path

from gpubpf.exporter.pods import AGAIN, Place, Pods
from gpubpf.process.containers import Container

POD = "96dd7de3-0783-4613-a707-e0effc077ef5"
FIRST, SECOND, THIRD = ("13a0f64b" * 8, "679f3691" * 8, "f3ee0462" * 8)


def kubelet(logs: Path) -> None:
    """Make the kubelet's directories. It keeps the log of the container that ran before a restart."""
    (logs / "containers").mkdir(parents=True)
    for number in (FIRST, SECOND):
        (logs / f"containers/train-0_ml-team_worker-{number}.log").symlink_to(
            f"/var/log/pods/ml-team_train-0_{POD}/worker/0.log"
        )
    (logs / f"pods/ml-team_train-0_{POD}/worker").mkdir(parents=True)


def test_names_of_a_pod(tmp_path: Path) -> None:
    kubelet(tmp_path)
    pods = Pods(tmp_path)
    assert pods.of(Container(SECOND, POD)) == Place("ml-team", "train-0", "worker")


def test_a_pod_whose_containers_have_no_logs_yet(tmp_path: Path) -> None:
    kubelet(tmp_path)
    now = [0.0]
    pods = Pods(tmp_path, lambda: now[0])
    assert pods.of(Container(THIRD, POD)) == Place("ml-team", "train-0", THIRD[:12])
    (tmp_path / f"containers/train-0_ml-team_side-car-{THIRD}.log").touch()
    assert pods.of(Container(THIRD, POD)).container == THIRD[:12], "the directory was just read"
    now[0] += AGAIN
    assert pods.of(Container(THIRD, POD)) == Place("ml-team", "train-0", "side-car")


def test_without_the_directories_the_numbers_are_shown(tmp_path: Path) -> None:
    pods = Pods(tmp_path / "none")
    assert pods.of(Container(FIRST, POD)) == Place("", POD, FIRST[:12])
    assert pods.of(Container(FIRST)) == Place("", "", FIRST[:12])
    assert pods.of(Container()) == Place()


def test_other_files_are_left_out(tmp_path: Path) -> None:
    kubelet(tmp_path)
    for name in ("containers/readme", "containers/a_b.log", "containers/_-.log", "pods/tmp", "pods/a_b"):
        (tmp_path / name).touch()
    assert Pods(tmp_path).of(Container(FIRST, POD)) == Place("ml-team", "train-0", "worker")


def test_a_process_that_has_ended_is_nowhere() -> None:
    assert Pods().place(1 << 30) == Place()
