#include "log/python.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "library.h"
#include "readable.h"

namespace gpubpf {

namespace {

constexpr size_t kNone = ~size_t(0);
constexpr size_t kMostCharacters = 1024;  // of a name
constexpr size_t kMostSteps = 1024;       // from frame to frame
constexpr uint8_t kOwnedByC = 3;          // from this owner on, a frame only stands for a call from C

// Where CPython's structures have what is needed here: offsets in bytes.
struct PythonLayout {
    size_t state_frame;           // of a thread's state: the innermost frame, or the C frame that has it
    size_t c_frame;               // of a C frame (3.11, 3.12): the innermost frame
    size_t code, previous;        // of a frame
    size_t instruction;           // of a frame: what it executes
    size_t instruction_size;      // 8: a pointer; 1 or 2: a number of units of 1 or 2 bytes
    size_t is_entry, owner;       // of a frame
    size_t file, qualified_name;  // of a code object
    size_t instructions;          // of a code object, for pointers to them
    size_t ascii, compact;        // of a string: characters, where all are ASCII, and where they are not
};

// The versions before _Py_DebugOffsets.
const PythonLayout kLayouts[] = {
    /* 3.9  */ {24, kNone, 32, 24, 104, 1, kNone, kNone, 104, 112, kNone, 48, 72},
    /* 3.10 */ {24, kNone, 32, 24, 96, 2, kNone, kNone, 104, 112, kNone, 48, 72},
    /* 3.11 */ {56, 8, 32, 48, 56, 8, 68, kNone, 112, 128, 184, 48, 72},
    /* 3.12 */ {56, 0, 0, 8, 56, 8, kNone, 70, 112, 128, 192, 40, 56},
};
constexpr uint32_t kFirst = 9, kFirstDebug = 13, kLast = 14;  // minor versions

constexpr size_t kType = 8, kLength = 16, kState = 32;  // of objects, and of strings

// _PyRuntime begins with _Py_DebugOffsets, an array of words. These are the indices at which its parts begin (pycore_runtime.h in 3.13,
// pycore_debug_offsets.h in 3.14). The parts have grown since 3.13, but at their ends.
struct DebugWords {
    size_t thread_state, frame, code, object, string;
};
const DebugWords kDebugWords[] = {{19, 28, 34, 44, 67}, {22, 31, 39, 50, 77}};

struct Interpreter {
    PythonLayout at{};
    const void *code_type = nullptr;
    void *(*state_of_thread)() =
        nullptr;  // PyGILState_GetThisThreadState: the thread's own state, also without the lock
    int (*is_initialized)() = nullptr;  // false as soon as the interpreter is ending
    int (*line_of_code)(uintptr_t code, int instruction) = nullptr;
    int (*line_of_frame)(uintptr_t frame) = nullptr;  // from 3.12 on
    // The frames of a thread were read with checks, and were what the layout says.
    std::atomic<bool> proven{false};
};

// 0: not looked for; 1: being looked for; 2: not readable; 3: found.
std::atomic<int> state{0};
Interpreter python;

// Checks memory before it is read. It remembers the last pages: the frames of a thread are close to each other.
class Readable {
  public:
    bool operator()(uintptr_t from, size_t size) {
        const uintptr_t last = from + size - 1;
        return from >= kPage && from % 8 == 0 && last >= from && last < uintptr_t(1) << 47 &&
               has(from / kPage) && (from / kPage == last / kPage || has(last / kPage));
    }

  private:
    static constexpr uintptr_t kPage = 4096;

    bool has(uintptr_t page) {
        if (std::find(std::begin(pages_), std::end(pages_), page) != std::end(pages_)) return true;
        if (!is_readable(reinterpret_cast<const uintptr_t *>(page * kPage))) return false;
        pages_[next_++ % 4] = page;
        return true;
    }

    uintptr_t pages_[4] = {};
    size_t next_ = 0;
};

bool readable(uintptr_t from, size_t size) { return Readable()(from, size); }

template <class T>
T value_at(uintptr_t from) {
    T value;
    memcpy(&value, reinterpret_cast<const void *>(from), sizeof value);
    return value;
}

uintptr_t word(uintptr_t from) { return value_at<uintptr_t>(from); }

bool read_debug_offsets(const void *runtime, uint32_t minor, PythonLayout &at) {
    const auto *words = static_cast<const uint64_t *>(runtime);
    if (!runtime || memcmp(words, "xdebugpy", 8) != 0 || words[1] >> 16 != (3u << 8 | minor)) return false;
    const DebugWords &part = kDebugWords[minor - kFirstDebug];
    const bool free_threaded = words[2];
    if (free_threaded || words[part.object + 1] != kType) return false;
    if (words[part.string + 1] != kState || words[part.string + 2] != kLength) return false;
    const uint64_t *frame = words + part.frame, *code = words + part.code;
    const size_t ascii = words[part.string + 3];
    at = {words[part.thread_state + 4],
          kNone,
          frame[2],
          frame[1],
          frame[3],
          8,
          kNone,
          frame[5],
          code[1],
          code[3],
          code[9],
          ascii,
          ascii + 16};
    return std::max({at.state_frame, at.code, at.previous, at.instruction, at.owner, at.file,
                     at.qualified_name, at.instructions, at.ascii}) < 4096;
}

bool look_for(uintptr_t code) {
    Dl_info info{};
    if (!dladdr(reinterpret_cast<void *>(code), &info)) return false;
    // The program itself has no name of its own for dlopen.
    void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!library || !dlsym(library, kEvaluates)) library = dlopen(nullptr, RTLD_LAZY);
    if (!library) return false;
    const char *(*version)() = nullptr;
    FunctionsOf functions(library);
    if (!functions.get(version, "Py_GetVersion")
             .get(python.state_of_thread, "PyGILState_GetThisThreadState")
             .get(python.is_initialized, "Py_IsInitialized")
             .get(python.line_of_code, "PyCode_Addr2Line")
             .all())
        return false;
    FunctionsOf(library).get(python.line_of_frame, "PyUnstable_InterpreterFrame_GetLine");
    python.code_type = dlsym(library, "PyCode_Type");
    // Py_GetVersion formats its text into a buffer once. The interpreter has done that while it started.
    const char *text = version();
    if (strncmp(text, "3.", 2) != 0 || !python.code_type) return false;
    const auto minor = static_cast<uint32_t>(strtoul(text + 2, nullptr, 10));
    if (minor < kFirst || minor > kLast) return false;
    if (minor >= kFirstDebug) return read_debug_offsets(dlsym(library, "_PyRuntime"), minor, python.at);
    python.at = kLayouts[minor - kFirst];
    return true;
}

bool is_code(uintptr_t object) {
    return readable(object, kType + 8) &&
           word(object + kType) == reinterpret_cast<uintptr_t>(python.code_type);
}

// Follows the frames from `frame` outwards. `checked`: reads nothing that may not be there.
void walk(uintptr_t frame, PythonFrames &frames, bool checked) {
    const PythonLayout &at = python.at;
    const size_t last = std::max({at.code, at.previous, at.instruction}) + 8;
    bool proven = true;
    Readable readable;
    for (size_t steps = 0; frame && steps < kMostSteps; ++steps) {
        if (checked && !readable(frame, last)) return;
        const uintptr_t code = word(frame + at.code) & ~uintptr_t(7);  // the low bits are tags
        const bool stands_for_c = at.owner != kNone && value_at<uint8_t>(frame + at.owner) >= kOwnedByC;
        if (stands_for_c) {
            if (frames.count && !frames.at[frames.count - 1].is_first) {
                frames.at[frames.count - 1].is_first = true;
                frames.at[frames.count - 1].entry = frame;
            }
            if (frames.more) break;
        } else if (frames.count == kMostPythonFrames) {  // look for the entry of the last one
            frames.more = true;
            if (at.owner == kNone) break;
        } else if (checked && !python.proven.load(std::memory_order_relaxed) && !is_code(code)) {
            proven = false;
        } else {
            const uintptr_t instruction =
                at.instruction_size == 8
                    ? word(frame + at.instruction)
                    : static_cast<uintptr_t>(value_at<int32_t>(frame + at.instruction)) * at.instruction_size;
            const bool is_first =
                at.is_entry != kNone ? value_at<bool>(frame + at.is_entry) : at.owner == kNone;
            frames.at[frames.count++] = {frame, code, instruction, is_first, 0};
        }
        frame = word(frame + at.previous);
    }
    frames.more = frames.more || frame;
    if (checked && proven && frames.count) python.proven.store(true, std::memory_order_release);
}

void append(std::string &text, uint32_t c) {
    if (c >= 0xD800 && c < 0xE000) c = '?';  // a byte that was not UTF-8
    if (c < 0x80) {
        text += static_cast<char>(c);
    } else {
        const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
        text += static_cast<char>((0xFF00 >> (more + 1) & 0xFF) | c >> 6 * more);
        for (int i = more - 1; i >= 0; --i) text += static_cast<char>(0x80 | (c >> 6 * i & 0x3F));
    }
}

// Returns a string of Python's as UTF-8, "" if it is not one.
std::string text_of(uintptr_t object) {
    if (!readable(object, python.at.compact)) return "";
    const auto state_bits = value_at<uint32_t>(object + kState);
    const unsigned size = state_bits >> 2 & 7;  // bytes of a character
    const bool compact = state_bits >> 5 & 1, ascii = state_bits >> 6 & 1;
    const uintptr_t from = object + (ascii ? python.at.ascii : python.at.compact);
    const size_t length = std::min<size_t>(word(object + kLength), kMostCharacters);
    if (!compact || (size != 1 && size != 2 && size != 4) || !length) return "";
    if (!readable(from & ~uintptr_t(7), (length * size + 15) & ~size_t(7))) return "";
    std::string text;
    for (size_t i = 0; i < length; ++i) {
        const uintptr_t at = from + i * size;
        append(text, size == 1   ? value_at<uint8_t>(at)
                     : size == 2 ? value_at<uint16_t>(at)
                                 : value_at<uint32_t>(at));
    }
    return text;
}

}  // namespace

bool reads_python() noexcept { return state.load(std::memory_order_acquire) == 3; }

bool found_python(uintptr_t code) noexcept {
    int expected = 0;
    if (state.compare_exchange_strong(expected, 1, std::memory_order_acq_rel))
        state.store(look_for(code) ? 3 : 2, std::memory_order_release);
    return reads_python();
}

void python_frames(PythonFrames &frames) noexcept {
    if (!reads_python() || !python.is_initialized()) return;
    const auto thread = reinterpret_cast<uintptr_t>(python.state_of_thread());
    if (!thread) return;
    const int error = errno;
    // An interpreter that ends frees the states of other threads than the one that ends it, at any time.
    const bool checked = !python.proven.load(std::memory_order_acquire) || getpid() != syscall(SYS_gettid);
    const PythonLayout &at = python.at;
    if (!checked || readable(thread, at.state_frame + 8)) {
        uintptr_t frame = word(thread + at.state_frame);
        if (at.c_frame != kNone)
            frame = !checked || readable(frame, at.c_frame + 8) ? word(frame + at.c_frame) : 0;
        walk(frame, frames, checked);
    }
    errno = error;
}

message::StackFrame described(const PythonFrame &frame) {
    const int error = errno;
    message::StackFrame made{frame.code, 0, "", "", 0, true};
    const PythonLayout &at = python.at;
    if (is_code(frame.code) && readable(frame.code, std::max(at.file, at.qualified_name) + 8)) {
        made.symbol = text_of(word(frame.code + at.qualified_name));
        made.file = text_of(word(frame.code + at.file));
        int line = 0;
        if (python.line_of_frame) {
            line = python.line_of_frame(frame.frame);
        } else {
            const uintptr_t begin = at.instruction_size == 8 ? frame.code + at.instructions : 0;
            line = python.line_of_code(frame.code, static_cast<int>(frame.instruction - begin));
        }
        made.line = static_cast<uint32_t>(std::max(line, 0));
    }
    if (made.symbol.empty()) made.symbol = "unknown";
    errno = error;
    return made;
}

}  // namespace gpubpf
