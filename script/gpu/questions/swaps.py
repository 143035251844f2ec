"""Kernels in a graph, replaced by copies of them."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from gpu.driver import (
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    CU_STREAM_CAPTURE_MODE_RELAXED,
    PTX,
    PUT,
    PUT_COPY,
    Driver,
    pointers,
)
from gpu.questions.asking import Answer, alone, question

# The names of members are cuda.h's; the tests compare where they lie.


class NodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_uint64),
        *((f"{what}Dim{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", ctypes.c_uint),
        ("kernelParams", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_uint64),
        ("ctx", ctypes.c_uint64),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{what}Dim{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_uint64),
        ("attrs", ctypes.c_void_p),
        ("numAttrs", ctypes.c_uint),
    ]


class UpdateResult(ctypes.Structure):
    """CUgraphExecUpdateResultInfo."""

    _fields_ = [("result", ctypes.c_uint), ("errorNode", ctypes.c_uint64), ("errorFromNode", ctypes.c_uint64)]


class HiddenParameter(ctypes.Structure):
    _fields_ = [("launch", ctypes.c_uint64), ("more", ctypes.c_uint64)]


def _launch_with(
    driver: Driver, function: int, out: int, stream: int, attribute: LaunchAttribute | None
) -> None:
    config = LaunchConfig(*(2, 1, 1), *(1, 1, 1), hStream=stream)
    if attribute is not None:
        config.attrs, config.numAttrs = ctypes.addressof(attribute), 1
    driver.must("cuLaunchKernelEx", ctypes.byref(config), function, pointers([out, 5]), 0)


def newest(driver: Driver, ptx: str) -> str:
    """Return PTX for Hopper, if the GPU is one: PTX for older GPUs cannot have clusters."""
    return ptx.replace(PTX, PTX.replace("7.0", "7.8").replace("sm_75", "sm_90")) if driver.cc() >= 90 else ptx


def _swap(attribute: LaunchAttribute | None) -> Answer:
    """Replace a captured kernel in the executable graph by a copy with one more parameter, as the agent does (docs/timing.md)."""
    driver = Driver().open()
    original, copy = (driver.kernel(newest(driver, ptx), "put") for ptx in (PUT, PUT_COPY))
    out, stream = driver.memory(8), driver.stream()
    driver.must("cuStreamBeginCapture_v2", stream, CU_STREAM_CAPTURE_MODE_RELAXED)
    graph = ctypes.c_uint64()
    try:
        _launch_with(driver, original, out, stream, None)
        _launch_with(driver, original, out, stream, attribute)
    finally:
        driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    executable = driver.handle("cuGraphInstantiateWithFlags", graph.value, 0)
    result: Answer = {}

    def replay() -> Any:
        driver.zero(out, 8)
        code = driver.call("cuGraphLaunch", executable, stream) or driver.call("cuStreamSynchronize", stream)
        return driver.read(out, 1)[0] if code == 0 else driver.name(code)

    def nodes_of(of: int) -> list[int]:
        count = ctypes.c_uint64()
        driver.must("cuGraphGetNodes", of, 0, ctypes.byref(count))
        nodes = (ctypes.c_uint64 * count.value)()
        driver.must("cuGraphGetNodes", of, nodes, ctypes.byref(count))
        return list(nodes)

    values = (ctypes.c_uint64 * 2)(out, 5)
    hidden = HiddenParameter(1, 100)
    addresses = [ctypes.addressof(values), ctypes.addressof(values) + 8, ctypes.addressof(hidden)]

    def swapped(node: int) -> NodeParameters:
        parameters = NodeParameters()
        driver.must("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(parameters))
        pointers_ = (ctypes.c_void_p * 3)(*addresses)
        parameters.func, parameters.kernelParams = copy, ctypes.addressof(pointers_)
        parameters.extra = None
        parameters.kern = 0
        parameters.keeps = pointers_
        return parameters

    result["before"] = replay()
    clone = driver.handle("cuGraphClone", graph.value)
    for node in nodes_of(clone):
        driver.must("cuGraphKernelNodeSetParams_v2", node, ctypes.byref(swapped(node)))
    info = UpdateResult()
    code = driver.call("cuGraphExecUpdate_v2", executable, clone, ctypes.byref(info))
    result["exec update"] = driver.name(code) + (f" ({info.result})" if info.result else "")
    result["after the update"] = replay()
    first = NodeParameters()
    driver.must("cuGraphKernelNodeGetParams_v2", nodes_of(graph.value)[0], ctypes.byref(first))
    result["the program reads back"] = "its own function" if first.func in (original, 0) else "something else"
    if attribute is not None:
        read = (ctypes.c_uint * 16)()
        code = driver.call("cuGraphKernelNodeGetAttribute", nodes_of(clone)[-1], attribute.id, read)
        result["attribute of the clone's node"] = driver.name(code) if code else list(read)[:4]
    back = driver.call("cuGraphExecUpdate_v2", executable, graph.value, ctypes.byref(info))
    result["update back"] = driver.name(back)
    result["after that"] = replay()
    codes = [
        driver.call("cuGraphExecKernelNodeSetParams_v2", executable, node, ctypes.byref(swapped(node)))
        for node in nodes_of(graph.value)
    ]
    result["one node set"] = driver.name(max(codes))
    result["after setting nodes"] = replay()
    return result


@question(
    "can a captured kernel be replaced in an executable graph by a copy with one more parameter, and back?",
    "yes, by cuGraphExecUpdate from a changed clone, and node by node; also with clusters and programmatic dependent launch",
    60,
)
def captured_swap() -> Answer:
    cluster = LaunchAttribute(id=CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    cluster.value[0], cluster.value[1], cluster.value[2] = 2, 1, 1
    dependent = LaunchAttribute(id=CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    dependent.value[0] = 1
    ways = {"plain": None, "clusters": cluster, "dependent launch": dependent}
    found = {name: alone(functools.partial(_swap, attribute), 15) for name, attribute in ways.items()}
    right = {
        "before": 5,
        "exec update": "CUDA_SUCCESS",
        "after the update": 105,
        "the program reads back": "its own function",
        "update back": "CUDA_SUCCESS",
        "after that": 5,
        "one node set": "CUDA_SUCCESS",
        "after setting nodes": 105,
    }
    odd = {
        name: {key: of.get(key) for key, value in right.items() if of.get(key) != value}
        if isinstance(of, dict)
        else of
        for name, of in found.items()
    }
    return {
        "answer": "; ".join(f"{name}: {of or 'as believed'}" for name, of in odd.items()),
        "agrees": not any(odd.values()),
        "found": found,
    }
