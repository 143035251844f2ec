// random [NAME]: rocRAND's generators. Numbers repeat for a seed, fill their range, and have the right mean and variance.
#include "check.h"
#include <rocrand/rocrand.h>

#define RAND(call) CHECK((call) == ROCRAND_STATUS_SUCCESS)

static double mean(const std::vector<float> &values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / values.size();
}

int main(int count, char **arguments) {
    struct {
        const char *name;
        rocrand_rng_type type;
        bool quasi;
    } kinds[] = {{"xorwow", ROCRAND_RNG_PSEUDO_XORWOW, false},
                 {"mrg32k3a", ROCRAND_RNG_PSEUDO_MRG32K3A, false},
                 {"philox", ROCRAND_RNG_PSEUDO_PHILOX4_32_10, false},
                 {"mtgp32", ROCRAND_RNG_PSEUDO_MTGP32, false},
                 {"sobol32", ROCRAND_RNG_QUASI_SOBOL32, true}};
    const size_t n = 4096;
    for (auto &kind : kinds) {
        if (count > 1 && strcmp(arguments[1], kind.name) != 0) continue;
        Buffer<float> floats(n);
        Buffer<unsigned> words(n);
        std::vector<float> uniform[2], normal;
        std::vector<unsigned> integers;
        for (int round = 0; round < 2; round++) {
            rocrand_generator generator;
            RAND(rocrand_create_generator(&generator, kind.type));
            if (!kind.quasi) RAND(rocrand_set_seed(generator, 1234));
            RAND(rocrand_generate_uniform(generator, floats, n));
            OK(hipDeviceSynchronize());
            uniform[round] = floats.read();
            if (round == 1) {
                RAND(rocrand_generate(generator, words, n));
                OK(hipDeviceSynchronize());
                integers = words.read();
                RAND(rocrand_generate_normal(generator, floats, n, 10.0f, 2.0f));
                OK(hipDeviceSynchronize());
                normal = floats.read();
            }
            RAND(rocrand_destroy_generator(generator));
        }
        CHECK(uniform[0] == uniform[1]);  // the seed is the same
        for (float value : uniform[0]) CHECK(value > 0.0f && value <= 1.0f);
        CHECK(std::fabs(mean(uniform[0]) - 0.5) < 0.03);
        unsigned all = 0, none = ~0u;
        for (unsigned word : integers) all |= word, none &= word;
        CHECK(kind.quasi || (all == ~0u && none == 0));  // the first points of a Sobol sequence have few bits
        double variance = 0, middle = mean(normal);
        for (float value : normal) variance += (value - middle) * (value - middle) / n;
        CHECK(std::fabs(middle - 10) < 0.2 && std::fabs(std::sqrt(variance) - 2) < 0.15);
        printf("%s\n", kind.name);
    }
}
