// Messages between the agent and the tool: framing, and bounded reading and writing. definitions.py declares and
// documents each message, and packing.py says how its fields are packed. protocol.py is the other side.
//
// A frame is {u32 type, u32 length} and `length` bytes, little endian. A file descriptor may accompany its
// first byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "definitions.h"

namespace gpubpf {

template <class T>
constexpr bool is_number = std::is_arithmetic_v<T> || std::is_enum_v<T>;
template <class T>
using Packed =
    std::conditional_t<std::is_same_v<T, bool>, uint32_t, T>;  // the number that stands for a number

// Packs a message of definitions.h, or a part of one.
class Writer {
  public:
    template <class Message>
    explicit Writer(const Message &message) {
        put(message);
    }
    std::vector<uint8_t> bytes;

  private:
    void raw(const void *data, size_t size) {
        const size_t at = bytes.size();
        bytes.resize(at + size);
        if (size) memcpy(bytes.data() + at, data, size);
    }
    template <class Items>
    void put_items(const Items &items) {
        put(static_cast<uint32_t>(items.size()));
        for (const auto &item : items) put(item);
    }
    void put_bytes(const void *data, size_t size) {
        put(static_cast<uint32_t>(size));
        raw(data, size);
    }
    template <class T>
    void put(const std::vector<T> &items) {
        put_items(items);
    }
    void put(const std::vector<uint8_t> &bytes) { put_bytes(bytes.data(), bytes.size()); }
    void put(const std::string &text) { put_bytes(text.data(), text.size()); }
    template <class T>
    void put(const std::optional<T> &value) {
        put(uint32_t(value.has_value()));
        if (value) put(*value);
    }
    template <class A, class B>
    void put(const std::pair<A, B> &both) {
        put(both.first);
        put(both.second);
    }
    template <class... T>
    void put(const std::tuple<T...> &values) {
        std::apply([this](const auto &...value) { (put(value), ...); }, values);
    }
    template <class T>
    void put(const T &value) {
        if constexpr (is_number<T>) {
            const auto number = static_cast<Packed<T>>(value);
            raw(&number, sizeof number);
        } else {
            put(value.tie());
        }
    }
};

// Unpacks the same. Reads past the end return zeros and clear ok(), so that callers check once, at the end.
class Reader {
  public:
    Reader(const uint8_t *data, size_t size) : next_(data), left_(size) {}
    explicit Reader(const std::vector<uint8_t> &payload) : Reader(payload.data(), payload.size()) {}
    // Returns whether the message was complete.
    template <class Message>
    bool read(Message &message) {
        get(message);
        return ok_;
    }

  private:
    void raw(void *to, size_t size);
    template <class T>
    void get(std::vector<T> &items) {
        uint32_t n;
        get(n);
        for (items.clear(); n && ok_; --n) get(items.emplace_back());
    }
    template <class Bytes>
    void get_bytes(Bytes &bytes) {
        uint32_t n;
        get(n);
        ok_ = ok_ && n <= left_;
        bytes.resize(ok_ ? n : 0);
        raw(bytes.data(), bytes.size());
    }
    void get(std::vector<uint8_t> &bytes) { get_bytes(bytes); }
    void get(std::string &text) { get_bytes(text); }
    template <class A, class B>
    void get(std::pair<A, B> &both) {
        get(both.first);
        get(both.second);
    }
    template <class Tuple>
    void get_each(Tuple &&values) {
        std::apply([this](auto &...value) { (get(value), ...); }, std::forward<Tuple>(values));
    }
    template <class... T>
    void get(std::tuple<T...> &values) {
        get_each(values);
    }
    template <class T>
    void get(T &value) {
        if constexpr (is_number<T>) {
            Packed<T> number;
            raw(&number, sizeof number);
            value = static_cast<T>(number);
        } else {
            get_each(value.tie());
        }
    }
    const uint8_t *next_;
    size_t left_;
    bool ok_ = true;
};

struct Frame {
    Message type{};
    std::vector<uint8_t> payload;
    int fd = -1;
};

// Both return false if the other side has closed the connection. `fd`: a file to send along, or -1.
bool send_frame(int socket, Message type, const std::vector<uint8_t> &payload, int fd);
bool receive_frame(int socket, Frame &frame);

// Returns the part behind kFilePrefix of a socket's name, or null.
const char *number_of_file(const char *name);
// Returns the tool's socket, or -1. A name that starts with @ is abstract. fd:N is a descriptor that this
// process already has.
int connect_to_tool(const char *name);
std::string process_name();  // as in /proc/self/comm

// A file descriptor, and whether it is still the agent's: a program may close every descriptor that it finds, and
// reuse the number for its own file.
struct OwnedFile {
    OwnedFile() = default;
    explicit OwnedFile(int descriptor);
    bool is_ours() const;
    int number = -1;
    uint64_t inode = 0;
};

// Creates an anonymous file of `size` zero bytes. Returns a high descriptor, or -1: programs may rely on low
// numbers.
int memory_file(const char *name, uint64_t size);
// Makes holes in a file, which is mapped at `bytes`, where `size` bytes from offset `from` on are zeros. A map of the whole context can be
// large and mostly empty, and the tool keeps the file. Arrays of instances get no holes: the tool compares their claimed size with
// the memory that the file takes.
void make_holes(int file, const char *bytes, uint64_t from, uint64_t size);
int sealed_file(const char *name, uint64_t size);  // its size is fixed, so that others can map it
int move_high(int fd);
bool write_all(int fd, const void *data, size_t size, uint64_t offset);
bool read_all(int fd, void *data, size_t size, uint64_t offset);

}  // namespace gpubpf
