// random_engines [NAME]: rocRAND's engines inside kernels, against the same engines compiled for the CPU.
#define FQUALIFIERS inline __host__ __device__
#include "check.h"
#include <rocrand/rocrand_kernel.h>
#include <rocrand/rocrand_sobol32_precomputed.h>
#include <rocrand/rocrand_sobol64_precomputed.h>

constexpr int THREADS = 256;
constexpr int DIMENSIONS = 16;  // of the Sobol sequences

struct Draws {
    unsigned long long raw[5];
    float uniform, normal, log_normal;
    double uniform_double, normal_double, log_normal_double;
    unsigned poisson[3];  // three algorithms
    unsigned long long last;
};

template <typename State>
__host__ __device__ void draw(State &state, Draws &out) {
    for (auto &raw : out.raw) raw = rocrand(&state);
    out.uniform = rocrand_uniform(&state);
    out.uniform_double = rocrand_uniform_double(&state);
    out.normal = rocrand_normal(&state);
    out.normal_double = rocrand_normal_double(&state);
    out.log_normal = rocrand_log_normal(&state, 0.5f, 0.25f);
    out.log_normal_double = rocrand_log_normal_double(&state, 0.5, 0.25);
    const double lambdas[] = {3.5, 500, 10000};
    for (int i = 0; i < 3; i++) out.poisson[i] = rocrand_poisson(&state, lambdas[i]);
    skipahead(12345, &state);
    out.last = rocrand(&state);
}

// Begins an engine that has subsequences: each thread has its own, at another offset.
template <typename State>
struct Seeded {
    __host__ __device__ void operator()(State &state, unsigned thread) const {
        rocrand_init(987654321ull, thread, thread * 1000ull, &state);
    }
};

// Begins a Sobol sequence: each thread has one of the dimensions, at another offset.
template <typename State, typename Word>
struct Directed {
    const Word *vectors;
    __host__ __device__ void operator()(State &state, unsigned thread) const {
        rocrand_init(vectors + thread % DIMENSIONS * sizeof(Word) * 8, thread * 100, &state);
    }
};

template <typename State, typename Begin>
__global__ void drawAll(Begin begin, Draws *out) {
    State state;
    begin(state, threadIdx.x);
    draw(state, out[threadIdx.x]);
}

static bool near(double given, double expected, double error) {
    return std::fabs(given - expected) <= error * (1 + std::fabs(expected));
}

template <typename State, typename Begin>
static void compare(const char *name, Begin on_device, Begin on_host, double error = 1e-5, double error_double = 1e-13) {
    Buffer<Draws> buffer(THREADS);
    drawAll<State><<<1, THREADS>>>(on_device, buffer.data);
    OK(hipGetLastError());
    std::vector<Draws> found = buffer.read();
    for (unsigned thread = 0; thread < THREADS; thread++) {
        State state;
        on_host(state, thread);
        Draws expected, &got = found[thread];
        draw(state, expected);
        CHECK(memcmp(got.raw, expected.raw, sizeof got.raw) == 0);
        CHECK(got.uniform == expected.uniform && got.uniform_double == expected.uniform_double);
        CHECK(near(got.normal, expected.normal, error) && near(got.normal_double, expected.normal_double, error_double));
        CHECK(near(got.log_normal, expected.log_normal, error));
        CHECK(near(got.log_normal_double, expected.log_normal_double, error_double));
        CHECK(memcmp(got.poisson, expected.poisson, sizeof got.poisson) == 0);
        CHECK(got.last == expected.last);
    }
    puts(name);
}

int main(int count, char **arguments) {
    auto wanted = [&](const char *name) { return count < 2 || strcmp(arguments[1], name) == 0; };
    if (wanted("xorwow")) compare<rocrand_state_xorwow>("xorwow", Seeded<rocrand_state_xorwow>{}, {});
    if (wanted("mrg32k3a")) compare<rocrand_state_mrg32k3a>("mrg32k3a", Seeded<rocrand_state_mrg32k3a>{}, {});
    if (wanted("philox")) compare<rocrand_state_philox4x32_10>("philox", Seeded<rocrand_state_philox4x32_10>{}, {});
    // Sobol's normal numbers are differences of nearly equal numbers, in which the CPU rounds products and the GPU does not.
    const double error = 1e-3, error_double = 1e-8;
    if (wanted("sobol32")) {
        const unsigned *table = h_sobol32_direction_vectors;
        Buffer<unsigned> vectors(std::vector<unsigned>(table, table + DIMENSIONS * 32));
        using Begin = Directed<rocrand_state_sobol32, unsigned>;
        compare<rocrand_state_sobol32>("sobol32", Begin{vectors.data}, Begin{table}, error, error_double);
    }
    if (wanted("sobol64")) {
        const unsigned long long *table = h_sobol64_direction_vectors;
        Buffer<unsigned long long> vectors(std::vector<unsigned long long>(table, table + DIMENSIONS * 64));
        using Begin = Directed<rocrand_state_sobol64, unsigned long long>;
        compare<rocrand_state_sobol64>("sobol64", Begin{vectors.data}, Begin{table}, error, error_double);
    }
}
