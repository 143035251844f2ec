/* hip THREADS LAUNCHES: some calls of HIP, then launches in each thread; what each call gave, without a GPU: 100 or 101. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    unsigned x, y, z;
} dim3;
int hipMalloc(void **, size_t);
int hipMemcpy(void *, const void *, size_t, int);
int hipGetDeviceCount(int *);
int hipLaunchKernel(const void *, dim3, dim3, void **, size_t, void *);
int hipDeviceSynchronize(void);

static int launches, kernel, failed;

static void *run(void *unused) {
    for (int i = 0; i < launches; i++)
        if (hipLaunchKernel(&kernel, (dim3){1, 2, 3}, (dim3){4, 5, 6}, 0, 77, (void *)0x1234))
            __sync_fetch_and_add(&failed, 1);
    return unused;
}

int main(int argc, char **argv) {
    int threads = argc > 2 ? atoi(argv[1]) : 1, count = 0;
    void *memory = 0;
    char other[8] = {0};
    pthread_t made[64];

    launches = argc > 2 ? atoi(argv[2]) : 1;
    printf("%p", (void *)&kernel);
    printf(" %d", hipGetDeviceCount(&count));
    printf(" %d", hipMalloc(&memory, 4096));
    printf(" %d", hipMemcpy(memory, other, sizeof other, 1));
    for (int i = 0; i < threads; i++) pthread_create(&made[i], 0, run, 0);
    for (int i = 0; i < threads; i++) pthread_join(made[i], 0);
    printf(" %d", failed);
    printf(" %d\n", hipDeviceSynchronize());
    return 0;
}
