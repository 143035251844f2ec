// saxpy [rounds]      default: 20
//
// y = a*x + y over 65,536 elements, in three steps that hipsnoop tells apart: the host prepares x for 5 ms, a kernel runs, and the
// host waits for it. Every second round, the result is copied to the host.
//
// Known answers: `saxpy` is launched once in each round, `hipStreamSynchronize` is called as often, `hipMemcpy` twice and then in every
// second round. Between launches the thread is asleep (clock_nanosleep). The program prints the sum of y: 131,072
// for each round.
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#include <vector>

#include <hip/hip_runtime.h>

#define OK(call)                                                                     \
    do {                                                                             \
        hipError_t status = (call);                                                  \
        if (status != hipSuccess) {                                                  \
            fprintf(stderr, "saxpy: " #call ": %s\n", hipGetErrorString(status)); \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

__global__ void saxpy(int n, float a, const float *x, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}

int main(int count, char **arguments) {
    const int rounds = count > 1 ? atoi(arguments[1]) : 20, n = 1 << 16;
    std::vector<float> x(n, 1), y(n, 0);
    float *device_x, *device_y;
    hipStream_t stream;
    OK(hipSetDeviceFlags(hipDeviceScheduleBlockingSync));  // do not poll
    OK(hipMalloc(&device_x, n * sizeof(float)));
    OK(hipMalloc(&device_y, n * sizeof(float)));
    OK(hipMemcpy(device_x, x.data(), n * sizeof(float), hipMemcpyHostToDevice));
    OK(hipMemcpy(device_y, y.data(), n * sizeof(float), hipMemcpyHostToDevice));
    OK(hipStreamCreate(&stream));
    for (int round = 1; round <= rounds; round++) {
        usleep(5000);
        saxpy<<<n / 256, 256, 0, stream>>>(n, 2, device_x, device_y);
        OK(hipStreamSynchronize(stream));
        if (round % 2 == 0) OK(hipMemcpy(y.data(), device_y, n * sizeof(float), hipMemcpyDeviceToHost));
    }
    OK(hipMemcpy(y.data(), device_y, n * sizeof(float), hipMemcpyDeviceToHost));
    double sum = 0;
    for (float value : y) sum += value;
    printf("%.0f\n", sum);
}
