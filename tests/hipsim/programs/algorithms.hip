// algorithms [NAME]: more of rocPRIM: sorts of pairs and segments, merges, runs, histograms, keys; against the host's algorithms.
#include "check.h"
#include <algorithm>
#include <map>
#include <rocprim/rocprim.hpp>

constexpr size_t COUNT = 5003;

template <typename Call>
static void run(Call call) {
    size_t bytes = 0;
    OK(call(nullptr, bytes));
    Buffer<char> temporary(std::max<size_t>(bytes, 1));
    OK(call(temporary.data, bytes));
    OK(hipDeviceSynchronize());
}

static std::vector<int> numbers(unsigned factor, int range) {
    std::vector<int> made(COUNT);
    for (size_t i = 0; i < COUNT; i++) made[i] = int((i * factor >> 7) % range) - range / 2;
    return made;
}

static const std::vector<int> values = numbers(2654435761u, 1000);

static void pairs() {
    std::vector<double> keys(COUNT);
    for (size_t i = 0; i < COUNT; i++) keys[i] = values[i] / 3.0;
    std::vector<unsigned> indices(COUNT), expected(COUNT);
    std::iota(indices.begin(), indices.end(), 0u);
    expected = indices;
    std::stable_sort(expected.begin(), expected.end(), [&](unsigned a, unsigned b) { return keys[a] > keys[b]; });
    Buffer<double> in(keys), out(COUNT);
    Buffer<unsigned> from(indices), to(COUNT);
    run([&](void *memory, size_t &bytes) {
        return rocprim::radix_sort_pairs_desc(memory, bytes, in.data, out.data, from.data, to.data, COUNT);
    });
    CHECK(to.read() == expected);
    std::sort(keys.begin(), keys.end(), std::greater<double>());
    CHECK(out.read() == keys);
}

static void merges() {
    std::vector<int> sorted = values, other = numbers(40503, 700), expected(2 * COUNT);
    Buffer<int> in(values), half(COUNT), both(2 * COUNT);
    run([&](void *memory, size_t &bytes) {
        return rocprim::merge_sort(memory, bytes, in.data, half.data, COUNT, rocprim::less<int>());
    });
    std::sort(sorted.begin(), sorted.end());
    CHECK(half.read() == sorted);
    std::sort(other.begin(), other.end());
    Buffer<int> second(other);
    run([&](void *memory, size_t &bytes) {
        return rocprim::merge(memory, bytes, half.data, second.data, both.data, COUNT, COUNT, rocprim::less<int>());
    });
    std::merge(sorted.begin(), sorted.end(), other.begin(), other.end(), expected.begin());
    CHECK(both.read() == expected);
}

static void segments() {
    std::vector<int> begin, expected;
    for (int at = 0; at < int(COUNT); at += at % 7 * 50 + 1) begin.push_back(at);
    begin.push_back(COUNT);
    const unsigned count = unsigned(begin.size() - 1);
    std::vector<int> sorted = values;
    for (unsigned i = 0; i < count; i++) {
        std::sort(sorted.begin() + begin[i], sorted.begin() + begin[i + 1]);
        expected.push_back(std::accumulate(values.begin() + begin[i], values.begin() + begin[i + 1], 0));
    }
    Buffer<int> in(values), out(COUNT), sums(count), offsets(begin);
    run([&](void *memory, size_t &bytes) {
        return rocprim::segmented_radix_sort_keys(memory, bytes, in.data, out.data, COUNT, count, offsets.data,
                                                  offsets.data + 1);
    });
    CHECK(out.read() == sorted);
    run([&](void *memory, size_t &bytes) {
        return rocprim::segmented_reduce(memory, bytes, in.data, sums.data, count, offsets.data, offsets.data + 1);
    });
    CHECK(sums.read() == expected);
}

static void runs() {
    std::vector<int> keys(COUNT), unique, lengths, sums;
    for (size_t i = 0; i < COUNT; i++) keys[i] = int(i * i / 9000);
    for (size_t i = 0; i < COUNT; i++) {
        if (i == 0 || keys[i] != keys[i - 1]) unique.push_back(keys[i]), lengths.push_back(0), sums.push_back(0);
        lengths.back()++;
        sums.back() += values[i];
    }
    Buffer<int> in(keys), weights(values), found(COUNT), counts(COUNT), number(1);
    auto same = [&](const Buffer<int> &buffer, const std::vector<int> &expected) {
        std::vector<int> got = buffer.read();
        CHECK(number.read()[0] == int(expected.size()) && std::equal(expected.begin(), expected.end(), got.begin()));
    };
    run([&](void *memory, size_t &bytes) {
        return rocprim::run_length_encode(memory, bytes, in.data, COUNT, found.data, counts.data, number.data);
    });
    same(found, unique);
    same(counts, lengths);
    run([&](void *memory, size_t &bytes) {
        return rocprim::reduce_by_key(memory, bytes, in.data, weights.data, COUNT, found.data, counts.data, number.data);
    });
    same(found, unique);
    same(counts, sums);
}

static void histogram() {
    std::vector<int> expected(20);
    for (int value : values) expected[(value + 500) / 50]++;
    Buffer<int> in(values), out(20);
    run([&](void *memory, size_t &bytes) {
        return rocprim::histogram_even(memory, bytes, in.data, COUNT, out.data, 21, -500, 500);
    });
    CHECK(out.read() == expected);
}

int main(int count, char **names) {
    struct {
        const char *name;
        void (*check)();
    } checks[] = {
        {"pairs", pairs}, {"merges", merges}, {"segments", segments}, {"runs", runs}, {"histogram", histogram}};
    for (auto &one : checks)
        if (count < 2 || strcmp(names[1], one.name) == 0) {
            one.check();
            puts(one.name);
            fflush(stdout);
        }
}
