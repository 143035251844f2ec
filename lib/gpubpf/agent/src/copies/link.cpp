#include "copies/link.h"

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <unistd.h>

#include "agent.h"

namespace gpubpf {

namespace {

constexpr size_t kMostResults = 1024;     // remembered results: programs keep copies and load them later
constexpr size_t kMostText = 256u << 20;  // bytes of PTX in all of them in total

struct Inputs {
    uint32_t count = 0, texts = 0;
    std::string text;   // all PTX inputs, separated by zero bytes
    bool lost = false;  // an input could not be read
};

struct Result {
    uint64_t bytes, hash;
    Inputs of;
};

struct Links {
    std::mutex lock;  // guards the members below
    std::map<CUlinkState, Inputs> open;
    std::deque<Result> results;
    size_t text = 0;  // bytes
};

AttachmentState<Links> all;

uint64_t hash_of(const void *data, uint64_t bytes) {  // FNV-1a
    uint64_t h = 14695981039346656037ull;
    const auto *p = static_cast<const uint8_t *>(data);
    for (uint64_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 1099511628211ull;
    return h;
}

void give(CUlinkState link, CUjitInputType type, std::string text) {
    std::lock_guard<std::mutex> hold(all->lock);
    auto it = all->open.find(link);
    if (it == all->open.end()) return;  // linking began before the attachment
    ++it->second.count;
    if (type != CU_JIT_INPUT_PTX) return;
    Inputs &of = it->second;
    of.lost = of.lost || text.empty() || of.text.size() + text.size() > kMostText;
    if (of.lost) text.clear();
    if (of.texts++ && !of.lost) of.text += '\0';
    of.text += text;
}

}  // namespace

const Lifetime link_lifetime = lifetime_of_attachment_state<all>();

void link_began(CUlinkState link) {
    std::lock_guard<std::mutex> hold(all->lock);
    all->open[link] = Inputs();
}

void link_given(CUlinkState link, CUjitInputType type, const void *data, size_t bytes) {
    std::string text;
    if (type == CU_JIT_INPUT_PTX)
        text.assign(static_cast<const char *>(data), strnlen(static_cast<const char *>(data), bytes));
    give(link, type, std::move(text));
}

void link_given_file(CUlinkState link, CUjitInputType type, const char *path) {
    uint64_t bytes = 0;
    uint32_t none = 0;
    std::string text;
    if (const int file = type == CU_JIT_INPUT_PTX ? image_of_file(path, bytes, none) : -1; file >= 0) {
        text.resize(bytes);
        if (!read_all(file, &text[0], bytes, 0)) text.clear();
        close(file);
    }
    give(link, type, std::move(text));
}

void link_made(CUlinkState link, const void *image) {
    uint64_t bytes = 0;
    const void *begin = image_at(image, bytes);
    if (!begin || !bytes) return;
    const uint64_t hash = hash_of(begin, bytes);
    std::lock_guard<std::mutex> hold(all->lock);
    auto it = all->open.find(link);
    if (it == all->open.end()) return;
    if (it->second.lost) it->second.text.clear();
    all->text += it->second.text.size();
    all->results.push_back({bytes, hash, it->second});
    while (all->results.size() > kMostResults || all->text > kMostText) {
        all->text -= all->results.front().of.text.size();
        all->results.pop_front();
    }
}

void link_ended(CUlinkState link) {
    std::lock_guard<std::mutex> hold(all->lock);
    all->open.erase(link);
}

uint32_t linked_of(const void *image, uint64_t bytes, int &ptx, uint64_t &size) {
    ptx = -1;
    std::lock_guard<std::mutex> hold(all->lock);
    uint64_t hash = 0;
    bool hashed = false;
    for (auto it = all->results.rbegin(); it != all->results.rend(); ++it) {
        if (it->bytes != bytes) continue;
        if (!hashed) hash = hash_of(image, bytes);
        hashed = true;
        if (it->hash != hash) continue;
        const std::string &text = it->of.text;
        if (!text.empty() && (ptx = memory_file("gpubpf-image", 0)) >= 0) {
            size = text.size();
            if (!write_all(ptx, text.data(), size, 0)) {
                close(ptx);
                ptx = -1;
            }
        }
        return it->of.count;
    }
    return 0;
}

}  // namespace gpubpf
