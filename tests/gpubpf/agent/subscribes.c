// subscribes LIBRARY before|after: subscribes to the Compute Sanitizer API before or after cuInit, and prints what that returns.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static void ignore(void *data, uint32_t domain, uint32_t id, const void *more) {
    (void)data, (void)domain, (void)id, (void)more;
}

int main(int argc, char **argv) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    int (*init)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
    int (*subscribe)(void **, void *, void *) =
        library ? (int (*)(void **, void *, void *))dlsym(library, "sanitizerSubscribe") : NULL;
    int (*leave)(void *) = library ? (int (*)(void *))dlsym(library, "sanitizerUnsubscribe") : NULL;
    void *subscriber = NULL;
    if (!init || !subscribe || !leave) return fprintf(stderr, "%s\n", dlerror()), 1;
    const int before = strcmp(argv[2], "before") == 0;
    if (before) printf("subscribe: %d\n", subscribe(&subscriber, (void *)ignore, NULL));
    printf("cuInit: %d\n", init(0));
    if (!before) printf("subscribe: %d\n", subscribe(&subscriber, (void *)ignore, NULL));
    if (subscriber) printf("unsubscribe: %d\n", leave(subscriber));
    return 0;
}
