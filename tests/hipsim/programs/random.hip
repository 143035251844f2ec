// random [NAME]: rocRAND's generators. Numbers repeat for a seed, move with the offset, and have the right mean and variance in
// every distribution; those of Philox and Sobol are the ones that their definitions give.
#include "check.h"
#include <hip/hip_fp16.h>
#include <rocrand/rocrand.h>

#define RAND(call) CHECK((call) == ROCRAND_STATUS_SUCCESS)

constexpr size_t COUNT = 8192;

struct Kind {
    const char *name;
    rocrand_rng_type type;
    bool quasi;
};

struct Generator {
    rocrand_generator handle;
    explicit Generator(const Kind &kind, unsigned long long offset = 0) {
        RAND(rocrand_create_generator(&handle, kind.type));
        if (!kind.quasi) RAND(rocrand_set_seed(handle, 1234));
        if (offset > 0) RAND(rocrand_set_offset(handle, offset));
    }
    ~Generator() { RAND(rocrand_destroy_generator(handle)); }
    operator rocrand_generator() const { return handle; }
};

template <typename T>
struct Identity {
    using Type = T;
};
template <typename T>
using Same = typename Identity<T>::Type;

// What one call of `generate` writes.
template <typename T, typename... Parameters>
static std::vector<T> numbers(
    rocrand_generator generator, rocrand_status (*generate)(rocrand_generator, T *, size_t, Parameters...),
    Same<Parameters>... parameters) {
    Buffer<T> buffer(COUNT);
    RAND(generate(generator, buffer, COUNT, parameters...));
    OK(hipDeviceSynchronize());
    return buffer.read();
}

static double real(double value) {
    return value;
}
static double real(__half value) {
    return __half2float(value);
}

// The mean and the standard deviation, within so many standard errors as chance does not exceed.
template <typename T>
static void moments(
    const std::vector<T> &values, double mean, double deviation, double (*of)(double) = [](double value) { return value; }) {
    double sum = 0, squares = 0;
    for (T value : values) sum += of(real(value));
    double middle = sum / values.size();
    for (T value : values) squares += (of(real(value)) - middle) * (of(real(value)) - middle);
    CHECK(std::fabs(middle - mean) < deviation * 6 / std::sqrt(values.size()));
    CHECK(std::fabs(std::sqrt(squares / values.size()) / deviation - 1) < 0.06);
}

template <typename T>
static void within(const std::vector<T> &values, double low, double high) {
    for (T value : values) CHECK(real(value) >= low && real(value) <= high);
}

// Every second number. The others are products with hsin, and AMD's hsin 5.2 gives NaN for all finite numbers.
static std::vector<__half> odd(const std::vector<__half> &values) {
    std::vector<__half> some;
    for (size_t i = 1; i < values.size(); i += 2) some.push_back(values[i]);
    return some;
}

static void distributions(const Kind &kind) {
    Generator generator(kind);
    const double even = 1 / std::sqrt(12.0);  // the deviation of even numbers from 0 to 1
    double (*logarithm)(double) = std::log;

    auto floats = numbers<float>(generator, rocrand_generate_uniform);
    within(floats, 0, 1);
    // rocRAND 5.3 takes only the low half of the 64 bits for some distributions, and it is 0 at the beginning.
    const bool whole = kind.type != ROCRAND_RNG_QUASI_SOBOL64;
    if (whole) moments(floats, 0.5, even);
    auto doubles = numbers<double>(generator, rocrand_generate_uniform_double);
    within(doubles, 0, 1);
    moments(doubles, 0.5, even);
    moments(numbers<double>(generator, rocrand_generate_normal_double, -3, 0.5), -3, 0.5);
    if (whole) {
        moments(numbers<float>(generator, rocrand_generate_normal, 10, 2), 10, 2);
        moments(numbers<float>(generator, rocrand_generate_log_normal, 1, 0.5), 1, 0.5, logarithm);
        moments(numbers<double>(generator, rocrand_generate_log_normal_double, 1, 0.5), 1, 0.5, logarithm);
    }
    for (double lambda : {5.0, 300.0, 5000.0})
        moments(numbers<unsigned>(generator, rocrand_generate_poisson, lambda), lambda, std::sqrt(lambda));
    if (kind.quasi) return;  // one sequence has few bits at its beginning, and halves and chars are not for it

    auto halves = numbers<__half>(generator, rocrand_generate_uniform_half);
    within(halves, 0, 1);
    moments(halves, 0.5, even);
    const __half one = __float2half(1), two = __float2half(2);
    moments(odd(numbers<__half>(generator, rocrand_generate_normal_half, two, one)), 2, 1);
    moments(odd(numbers<__half>(generator, rocrand_generate_log_normal_half, one, one)), 1, 1, logarithm);
    moments(numbers<unsigned char>(generator, rocrand_generate_char), 127.5, 256 * even);
    moments(numbers<unsigned short>(generator, rocrand_generate_short), 32767.5, 65536 * even);
    unsigned all = 0, none = ~0u;
    for (unsigned word : numbers<unsigned>(generator, rocrand_generate)) all |= word, none &= word;
    CHECK(all == ~0u && none == 0);
}

// The numbers of Philox4x32-10 (Salmon et al., 2011) for a seed: four for each value of the counter.
static std::vector<unsigned> philox(unsigned seed) {
    std::vector<unsigned> made;
    for (unsigned counter = 0; counter < COUNT / 4; counter++) {
        unsigned key[] = {seed, 0}, word[] = {counter, 0, 0, 0};
        for (int round = 0; round < 10; round++) {
            uint64_t even = uint64_t(word[0]) * 0xD2511F53u, odd = uint64_t(word[2]) * 0xCD9E8D57u;
            unsigned next[] = {
                unsigned(odd >> 32) ^ word[1] ^ key[0], unsigned(odd), unsigned(even >> 32) ^ word[3] ^ key[1],
                unsigned(even)};
            std::copy(next, next + 4, word);
            key[0] += 0x9E3779B9u;
            key[1] += 0xBB67AE85u;
        }
        made.insert(made.end(), word, word + 4);
    }
    return made;
}

// The first dimension of Sobol's sequence: the reversed bits of the index in Gray code.
static std::vector<unsigned> sobol() {
    std::vector<unsigned> made(COUNT);
    for (unsigned i = 0; i < COUNT; i++)
        for (unsigned bit = 0; bit < 32; bit++) made[i] |= ((i ^ i >> 1) >> bit & 1) << (31 - bit);
    return made;
}

static void sequence(const Kind &kind) {
    if (kind.type == ROCRAND_RNG_QUASI_SOBOL64) {  // numbers of 64 bits cannot be generated, only converted ones
        std::vector<double> expected;
        for (unsigned word : sobol()) expected.push_back(word / 4294967296.0);
        auto found = numbers<double>(Generator(kind), rocrand_generate_uniform_double);
        for (size_t i = 0; i < COUNT; i++) CHECK(std::fabs(found[i] - expected[i]) < 1e-12);
        return;
    }
    auto first = numbers<unsigned>(Generator(kind), rocrand_generate);
    CHECK(first == numbers<unsigned>(Generator(kind), rocrand_generate));
    if (kind.type == ROCRAND_RNG_PSEUDO_PHILOX4_32_10) CHECK(first == philox(1234));
    if (kind.type == ROCRAND_RNG_QUASI_SOBOL32) CHECK(first == sobol());
    if (kind.type == ROCRAND_RNG_PSEUDO_MTGP32) return;  // it has no offset
    const size_t moved = 4096;
    auto later = numbers<unsigned>(Generator(kind, moved), rocrand_generate);
    CHECK(later != first);
    if (kind.quasi || kind.type == ROCRAND_RNG_PSEUDO_PHILOX4_32_10)  // the others interleave many sequences
        CHECK(std::equal(first.begin() + moved, first.end(), later.begin()));
}

int main(int count, char **arguments) {
    const Kind kinds[] = {{"xorwow", ROCRAND_RNG_PSEUDO_XORWOW, false},
                          {"mrg32k3a", ROCRAND_RNG_PSEUDO_MRG32K3A, false},
                          {"philox", ROCRAND_RNG_PSEUDO_PHILOX4_32_10, false},
                          {"mtgp32", ROCRAND_RNG_PSEUDO_MTGP32, false},
                          {"sobol32", ROCRAND_RNG_QUASI_SOBOL32, true},
                          {"sobol64", ROCRAND_RNG_QUASI_SOBOL64, true}};
    for (const Kind &kind : kinds) {
        if (count > 1 && strcmp(arguments[1], kind.name) != 0) continue;
        sequence(kind);
        distributions(kind);
        printf("%s\n", kind.name);
        fflush(stdout);
    }
}
