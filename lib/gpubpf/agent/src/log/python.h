// The Python frames of the calling thread, where the program has a CPython interpreter of version 3.9 to 3.14.
//
// Frames are only read. Nothing of Python is executed, allocated or counted, and no lock is taken. The thread is inside a
// C function that Python has called, so nobody else changes its frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "messages.h"

namespace gpubpf {

constexpr size_t kMostPythonFrames = kStackLimit - 1;
constexpr const char kEvaluates[] =
    "_PyEval_EvalFrameDefault";  // the function whose native frames run Python's

struct PythonFrame {
    uintptr_t frame = 0, code = 0, instruction = 0;
    bool is_first = false;  // the outermost frame that its call of kEvaluates runs
    uintptr_t entry = 0;    // of a first frame, from 3.12 on: an address in the native frame of that call
};

struct PythonFrames {
    PythonFrame at[kMostPythonFrames];  // innermost first
    size_t count = 0;
    bool more = false;  // frames outside of these are missing
};

// Looks for the interpreter, once, given an address in the program or library that has it. Returns whether its frames can be read.
bool found_python(uintptr_t code) noexcept;

// Whether the program has an interpreter whose frames can be read, as far as found_python has seen.
bool reads_python() noexcept;

// Reads the frames. None, if the program has no interpreter, the interpreter is ending, or the thread has no Python state.
void python_frames(PythonFrames &frames) noexcept;

// Returns a frame as the tool gets it: the function's qualified name, its file and line.
message::StackFrame described(const PythonFrame &frame);

}  // namespace gpubpf
