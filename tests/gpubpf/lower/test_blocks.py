"""Who of a block is the first or the last: the code that decides it, run step by step in any order, and on the device."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter

import llvmlite.binding as llvm
import pytest

from gpubpf.lower import storage
from gpubpf.lower.host_code import HOST
from gpubpf_steps import basic_blocks, steps

SLOTS = 16


def parsed(last, probes=SLOTS, slots=SLOTS):
    """The basic blocks of the function."""
    return basic_blocks(storage.block_function("f", last, HOST, slots, probes))


def thread(blocks, memory, base, launch, block, threads):
    """A thread that runs the function, step by step."""
    return steps(blocks, memory, {"%base": base, "%launch": launch, "%block": block, "%threads": threads})


def play(blocks, rng, waves=30, together=3, threads=3):
    """Blocks come and go, `together` at a time, their threads in any order. (how many were elected by block, what is left in
    memory)"""
    memory, elected = Counter(), Counter()
    live = {}
    come = 0
    while come < waves or live:
        if come < waves and len(live) < together:
            launch, number = rng.randrange(4), rng.randrange(2)
            live[come] = [
                thread(blocks, memory, 0, launch + 4 * come, number, threads) for _ in range(threads)
            ]
            come += 1
            continue
        which = rng.choice(list(live))
        one = rng.choice(live[which])
        for _ in range(rng.choice((1, 1, 2, 5))):
            try:
                next(one)
            except StopIteration as end:
                if end.value:
                    elected[which] += 1
                live[which].remove(one)
                if not live[which]:
                    del live[which]
                break
    return elected, {at: value for at, value in memory.items() if value}


def crowded(last, slots=SLOTS):
    """The function with all blocks at two homes."""
    blocks = parsed(last, slots, slots)
    blocks["mix"] = [
        line.replace("trunc i64 %number to i32", "trunc i64 %block to i32") for line in blocks["mix"]
    ]
    return blocks


@pytest.mark.every(2)
@pytest.mark.parametrize("last", [False, True])
def test_each_block_has_one(last):
    """However their steps fall; and at the end the table is as it was."""
    blocks = crowded(last)
    for seed in range(25):
        elected, left = play(blocks, random.Random(seed))
        assert elected == Counter(range(30)), f"seed {seed}: {elected}"
        assert not left, f"seed {seed}"


def test_marks_are_needed():
    """Without them a slot that becomes free is taken twice for one block: this test would see it."""
    blocks = crowded(False)
    blocks["pass"] = [line.replace("i64 1 ", "i64 0 ") for line in blocks["pass"]]
    blocks["swept"] = [line.replace("i64 %marks_there", "i64 0") for line in blocks["swept"]]
    assert any(play(blocks, random.Random(seed))[0] != Counter(range(30)) for seed in range(25))


def test_what_finds_no_room_is_counted():
    """And still none runs twice."""
    blocks = crowded(True, 4)
    none = 0
    for seed in range(30):
        elected, left = play(blocks, random.Random(seed))
        assert max(elected.values()) == 1
        assert 30 - len(elected) <= 3 * left.get(0, 0)
        none += 30 - len(elected)
    assert none


STRESS = r"""
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>
extern "C" bool elect(uint64_t base, uint64_t launch, uint64_t block, uint32_t threads);
int main() {
    const int threads = 4, window = 8, windows = 4000;
    static std::atomic<uint64_t> table[2 * (SLOTS + 1)];
    std::vector<std::atomic<int>> elected(window * windows);
    std::atomic<int> at[threads] = {};
    auto run = [&](int me) {
        std::mt19937 random(me);
        for (int w = 0; w < windows; w++) {
            int order[window];
            for (int i = 0; i < window; i++) order[i] = i;
            std::shuffle(order, order + window, random);
            for (int i : order)
                if (elect((uint64_t)table, w, i % 3 ? i : i << 16, threads)) elected[window * w + i]++;
            at[me] = w + 1;
            for (auto &other : at)  // at most two windows are under way
                while (other < w) std::this_thread::yield();
        }
    };
    std::vector<std::thread> all;
    for (int i = 0; i < threads; i++) all.emplace_back(run, i);
    for (auto &thread : all) thread.join();
    int wrong = 0, left = 0;
    for (auto &count : elected) wrong += count != 1;
    for (auto &word : table) left += word != 0;
    printf("%d wrong, %d left\n", wrong, left);
}
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("last", [False, True])
def test_threads_of_a_processor(last, tmp_path):
    """The same code for this machine, run by threads that really race."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text = storage.block_function("elect", last, HOST, 64)
    module = llvm.parse_assembly(text.replace("internal", "zeroext").replace("alwaysinline", ""))
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(opt=2, reloc="pic", codemodel="small")
    (tmp_path / "elect.o").write_bytes(machine.emit_object(module))
    (tmp_path / "stress.cpp").write_text(STRESS)
    command = [compiler, "-O1", "-pthread", "-DSLOTS=64", "stress.cpp", "elect.o", "-o", "stress"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "stress"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "0 wrong, 0 left\n"
