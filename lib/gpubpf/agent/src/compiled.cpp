#include "compiled.h"

#include <cstring>
#include <optional>
#include <utility>

namespace gpubpf {

namespace {

constexpr size_t kMostResults = 1024;

uint64_t hash_of(const void *data, size_t bytes) {  // FNV-1a
    uint64_t h = 14695981039346656037ull;
    const auto *p = static_cast<const uint8_t *>(data);
    for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 1099511628211ull;
    return h;
}

}  // namespace

void Inputs::add_ptx(const char *ptx, size_t bytes) {
    const size_t length = ptx ? strnlen(ptx, bytes) : 0;
    ++count;
    lost = lost || !length || length > kMostPtx - text.size();
    if (lost) text.clear();
    else {
        if (texts) text += '\0';
        text.append(ptx, length);
    }
    ++texts;
}

void Inputs::add(const Inputs &of) {
    count += of.count;
    lto += of.lto;
    lost = lost || of.lost || of.text.size() >= kMostPtx - text.size();
    if (lost) text.clear();
    else if (of.texts) {
        if (texts) text += '\0';
        text += of.text;
    }
    texts += of.texts;
}

void Compiled::remember(const void *cubin, size_t bytes, Inputs of) {
    const uint64_t hash = hash_of(cubin, bytes);
    std::lock_guard<std::mutex> hold(lock_);
    text_ += of.text.size();
    results_.push_back({bytes, hash, std::move(of)});
    while (results_.size() > kMostResults || text_ > kMostPtx) {
        text_ -= results_.front().of.text.size();
        results_.pop_front();
    }
}

bool Compiled::find(const void *cubin, size_t bytes, Inputs &of) {
    std::lock_guard<std::mutex> hold(lock_);
    std::optional<uint64_t> hash;
    for (auto it = results_.rbegin(); it != results_.rend(); ++it) {
        if (it->bytes != bytes) continue;
        if (!hash) hash = hash_of(cubin, bytes);
        if (it->hash != *hash) continue;
        of = it->of;
        return true;
    }
    return false;
}

}  // namespace gpubpf
