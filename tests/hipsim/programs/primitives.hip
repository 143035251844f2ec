// rocPRIM: scan, reduction, sort, selection, run lengths; against the host's algorithms.
#include "check.h"
#include <algorithm>
#include <rocprim/rocprim.hpp>

template <typename Call>
static void run(Call call) {
    size_t bytes = 0;
    OK(call(nullptr, bytes));
    void *temporary;
    OK(hipMalloc(&temporary, bytes == 0 ? 1 : bytes));
    OK(call(temporary, bytes));
    OK(hipDeviceSynchronize());
    OK(hipFree(temporary));
}

int main(int count, char **arguments) {
    std::string only = count > 1 ? arguments[1] : "";
    const size_t n = 10007;
    std::vector<int> values(n);
    for (size_t i = 0; i < n; i++) values[i] = static_cast<int>((i * 2654435761u >> 7) % 1000);
    Buffer<int> in(values), out(n), number(1);

    if (only.empty() || only == "scan") {
        run([&](void *memory, size_t &bytes) {
            return rocprim::inclusive_scan(memory, bytes, in.data, out.data, n, rocprim::plus<int>());
        });
        std::vector<int> expected(n);
        std::partial_sum(values.begin(), values.end(), expected.begin());
        CHECK(out.read() == expected);
        puts("scan");
    }
    if (only.empty() || only == "reduce") {
        run([&](void *memory, size_t &bytes) {
            return rocprim::reduce(memory, bytes, in.data, number.data, 0, n, rocprim::maximum<int>());
        });
        CHECK(number.read()[0] == *std::max_element(values.begin(), values.end()));
        puts("reduce");
    }
    if (only.empty() || only == "sort") {
        run([&](void *memory, size_t &bytes) {
            return rocprim::radix_sort_keys(memory, bytes, in.data, out.data, n);
        });
        std::vector<int> expected = values;
        std::sort(expected.begin(), expected.end());
        CHECK(out.read() == expected);
        puts("sort");
    }
    if (only.empty() || only == "select") {
        run([&](void *memory, size_t &bytes) {
            return rocprim::select(memory, bytes, in.data, out.data, number.data, n,
                                   [] __device__(int value) { return value % 3 == 0; });
        });
        std::vector<int> expected, got = out.read();
        for (int value : values)
            if (value % 3 == 0) expected.push_back(value);
        got.resize(number.read()[0]);
        CHECK(got == expected);
        puts("select");
    }
}
