"""The containers of processes, by cgroup files as container runtimes write them."""

from __future__ import annotations

import os

import pytest

from gpubpf.process import containers
from gpubpf.process.containers import Container, in_paths

# Paths that people recorded on real machines, in public tests and reports of other projects: OpenTelemetry (Java), SPIRE, Tetragon,
# Linkerd's policy enforcer and others.
SEEN = [
    # docker: cgroupfs and systemd, versions 1 and 2
    ("12:memory:/docker/" + "4a" * 32 + "\n1:name=systemd:/docker/" + "4a" * 32, "4a" * 32, ""),
    ("0::/system.slice/docker-" + "3350ade4" * 8 + ".scope", "3350ade4" * 8, ""),
    # podman
    ("0::/machine.slice/libpod-" + "b2" * 32 + ".scope/container", "b2" * 32, ""),
    # containerd, systemd, version 2: in a kubelet with a root of its own
    (
        "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
        "kubelet-kubepods-besteffort-pod18640755_cc12_4557_b96e_0f74d5b44d1d.slice/"
        "cri-containerd-66221e7d988e193822a3e8368b61ad9aeabf6b5276df76daebb7ea33bccc0b87.scope",
        "66221e7d988e193822a3e8368b61ad9aeabf6b5276df76daebb7ea33bccc0b87",
        "18640755-cc12-4557-b96e-0f74d5b44d1d",
    ),
    # the same in kind, whose machine is a docker container
    (
        "0::/docker/65a1b6ad09655b3f1475ede1aa0061a97c0d1ada9f2b2acac959afbc92094463/kubelet.slice/"
        "kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
        "kubelet-kubepods-besteffort-pod96dd7de3_0783_4613_a707_e0effc077ef5.slice/"
        "cri-containerd-13a0f64b909e3ff2d63f196d6947927a8af997ab68f8fa9ebb6d6c7018af4ec9.scope",
        "13a0f64b909e3ff2d63f196d6947927a8af997ab68f8fa9ebb6d6c7018af4ec9",
        "96dd7de3-0783-4613-a707-e0effc077ef5",
    ),
    (
        "/system.slice/docker-3350ade4226f0adcd9e4e9545d7c2a16a5aa362d12315f2a88e2024cea1246cf.scope/"
        "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
        "kubelet-kubepods-besteffort-podb6a16766_05ee_446a_8ee5_ff96a817f47c.slice/"
        "cri-containerd-679f3691f7f1b20198548be43b86f265f9fff9be0ac4c973638f5ee89decbca9.scope",
        "679f3691f7f1b20198548be43b86f265f9fff9be0ac4c973638f5ee89decbca9",
        "b6a16766-05ee-446a-8ee5-ff96a817f47c",
    ),
    # containerd without SystemdCgroup, below a kubelet with the systemd driver
    (
        "11:devices:/system.slice/containerd.service/kubepods-pod87a18a64_b74a_454a_b10b_a4a36059d0a3.slice"
        ":cri-containerd:05c48c82caff3be3d7f1e896981dd410e81487538936914f32b624d168de9db0",
        "05c48c82caff3be3d7f1e896981dd410e81487538936914f32b624d168de9db0",
        "87a18a64-b74a-454a-b10b-a4a36059d0a3",
    ),
    (
        "9:cpuset:/kubepods-besteffort-pod30556cce_0f92_11eb_b36d_02623cf324c8.slice"
        ":cri-containerd:c688c856b21cfb29c1dbf6c14793435e44a1299dfc12add33283239bffed2620",
        "c688c856b21cfb29c1dbf6c14793435e44a1299dfc12add33283239bffed2620",
        "30556cce-0f92-11eb-b36d-02623cf324c8",
    ),
    # cgroupfs, version 1: burstable, and guaranteed
    (
        "11:memory:/kubepods/burstable/podc9c501eb-9423-4bd6-b96f-7f10f7f4527c/"
        "f3ee04629f75567e95fae8425cb3e9b3e1c91346b1a2ddee9139c9216c713dc7\n"
        "1:name=systemd:/kubepods/burstable/podc9c501eb-9423-4bd6-b96f-7f10f7f4527c/"
        "f3ee04629f75567e95fae8425cb3e9b3e1c91346b1a2ddee9139c9216c713dc7\n0::/",
        "f3ee04629f75567e95fae8425cb3e9b3e1c91346b1a2ddee9139c9216c713dc7",
        "c9c501eb-9423-4bd6-b96f-7f10f7f4527c",
    ),
    (
        "5:cpu:/kubepods/poda2830d0d-b0f0-4ff0-81b5-0ee4e299cf80/"
        "09bc3d7ade839efec32b6bec4ec79d099027a668ddba043083ec21d3c3b8f1e6",
        "09bc3d7ade839efec32b6bec4ec79d099027a668ddba043083ec21d3c3b8f1e6",
        "a2830d0d-b0f0-4ff0-81b5-0ee4e299cf80",
    ),
    # CRI-O: systemd with the container's own cgroup inside, cgroupfs, its monitor, and seen from another cgroup namespace
    (
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod2c48913c_b29f_11e7_9350_020968147796.slice/"
        "crio-45490e76e0878aaa4d9808f7d2eefba37f093c3efbba9838b6d8ab804d9bd814.scope/container",
        "45490e76e0878aaa4d9808f7d2eefba37f093c3efbba9838b6d8ab804d9bd814",
        "2c48913c-b29f-11e7-9350-020968147796",
    ),
    (
        "0::/kubepods/besteffort/pod2c48913c-b29f-11e7-9350-020968147796/"
        "crio-45490e76e0878aaa4d9808f7d2eefba37f093c3efbba9838b6d8ab804d9bd814",
        "45490e76e0878aaa4d9808f7d2eefba37f093c3efbba9838b6d8ab804d9bd814",
        "2c48913c-b29f-11e7-9350-020968147796",
    ),
    (
        "0::/kubepods.slice/kubepods-pod2c48913c_b29f_11e7_9350_020968147796.slice/"
        "crio-conmon-45490e76e0878aaa4d9808f7d2eefba37f093c3efbba9838b6d8ab804d9bd814.scope",
        "",
        "2c48913c-b29f-11e7-9350-020968147796",
    ),
    (
        "0::/../crio-45490e76e0878aaa4d9808f7d2eefba37f093c3efbba9838b6d8ab804d9bd814.scope",
        "45490e76e0878aaa4d9808f7d2eefba37f093c3efbba9838b6d8ab804d9bd814",
        "",
    ),
    # cri-dockerd, and a pod from a file on the machine
    (
        "0::/kubepods.slice/kubepods-pod3e5b1f2d6c8a4b0e9f7d1c2b3a495867.slice/docker-"
        + "1f" * 32
        + ".scope",
        "1f" * 32,
        "3e5b1f2d6c8a4b0e9f7d1c2b3a495867",
    ),
    # a service, a user's session, the root
    ("0::/system.slice/ssh.service", "", ""),
    ("0::/user.slice/user-1000.slice/session-2.scope", "", ""),
    ("12:pids:/user.slice\n0::/", "", ""),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "number", "pod"), SEEN)
def test_paths_of_real_machines(text: str, number: str, pod: str) -> None:
    text = text if not text or text[0] != "/" else f"0::{text}"
    assert in_paths(text) == Container(number, pod)


@pytest.mark.parametrize(
    "text",
    [
        "0::/pod" + "a" * 63,
        "0::/" + "a" * 65,
        "0::/kubepods/podnothing/../..",
        "no colon",
        "0:" + ":" * 300,
        "0::/" + "/".join(["a" * 64] * 2000) + "x",
    ],
)
def test_other_texts_name_no_container_or_a_whole_one(text: str) -> None:
    assert in_paths(text).id in ("", "a" * 64)


def test_this_process() -> None:
    assert len(containers.of(os.getpid()).id) in (0, 64)
    with pytest.raises(OSError):
        containers.of(1 << 30)
