// Runs a target without libFuzzer: main RUNS SEED FILE… runs it on the files, and on RUNS changed copies of them. SEED chooses the
// changes. The input under way is in the file that $FUZZ_INPUT names, if the target ends the process.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

using Bytes = std::vector<uint8_t>;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*callback)());

static const Bytes *current;

static void keep_input() {
    const char *path = getenv("FUZZ_INPUT");
    if (!path || !current) return;
    if (FILE *file = fopen(path, "wb")) {
        fwrite(current->data(), 1, current->size(), file);
        fclose(file);
    }
}

static void run(const Bytes &input) {
    current = &input;
    LLVMFuzzerTestOneInput(input.data(), input.size());
}

int main(int count, char **arguments) {
    __sanitizer_set_death_callback(keep_input);
    std::vector<Bytes> inputs;
    for (int i = 3; i < count; i++) {
        std::ifstream file(arguments[i], std::ios::binary);
        inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        run(inputs.back());
    }
    std::mt19937 random(atoi(arguments[2]));
    auto below = [&](size_t limit) { return limit ? random() % limit : 0; };
    for (int left = inputs.empty() ? 0 : atoi(arguments[1]); left > 0; left--) {
        Bytes made = inputs[below(inputs.size())];
        for (size_t changes = 1 + below(6); changes; changes--) {
            const size_t at = below(made.size() + 1);
            const Bytes &other = inputs[below(inputs.size())];
            const size_t from = below(other.size()), size = std::min<size_t>(below(32), other.size() - from);
            const auto place = made.begin() + static_cast<ptrdiff_t>(at);
            switch (below(4)) {
                case 0:  // a number at the edge of its range
                    for (size_t i = at, value = below(4); i < std::min(at + (1u << below(4)), made.size());
                         i++)
                        made[i] = value == 0 ? 0 : value == 1 ? 0xFF : static_cast<uint8_t>(random());
                    break;
                case 1:
                    made.insert(place, other.begin() + static_cast<ptrdiff_t>(from),
                                other.begin() + static_cast<ptrdiff_t>(from + size));
                    break;
                case 2:
                    made.erase(place, place + static_cast<ptrdiff_t>(std::min(made.size() - at, below(16))));
                    break;
                default:
                    if (at < made.size()) made[at] = static_cast<uint8_t>(random());
            }
        }
        run(made);
    }
    return 0;
}
