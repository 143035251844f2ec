// captured: loads, unloads and links while a stream is captured. Where the driver refuses (hostile mode) the capture is lost, and
// the program goes on; what it captures afterwards holds what it should.
#include "jit.h"

static const char text[] = HEAD ".visible .entry more(.param .u64 p)\n{\n .reg .b64 %rd<2>;\n .reg .b32 %r<2>;\n ld.param.u64 %rd1, [p];\n"
                                " ld.global.u32 %r1, [%rd1];\n add.u32 %r1, %r1, 1;\n st.global.u32 [%rd1], %r1;\n ret;\n}\n";
static CUstream stream;
static int refused;

// Ends the capture around a call that gave `status`.
static void settle(CUresult status, const char *call) {
    CUgraph graph = NULL;
    CUresult ended = cuStreamEndCapture(stream, &graph);
    if (status == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) {
        if (ended != CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) FAIL("%s is refused, and the capture ends with %d", call, (int)ended);
        refused++;
        return;
    }
    if (status != CUDA_SUCCESS || ended != CUDA_SUCCESS) FAIL("%s gives %d, the capture %d", call, (int)status, (int)ended);
    CHECK(cuGraphDestroy(graph));
}

int main(int argc, char **argv) {
    begin(argc, argv);
    CUmodule module, second;
    CUlibrary library;
    CUfunction function;
    CUlinkState link;
    CUdeviceptr out = memory(4);
    void *parameters[] = {&out}, *image;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuModuleLoadData(&module, text));
    CHECK(cuModuleGetFunction(&function, module, "more"));
    while (another()) {
        CHECK(cuMemsetD8(out, 0, 4));
        CHECK(cuCtxSynchronize());  // the memset is asynchronous, and `stream` does not wait for the NULL stream
#define CAPTURED(call) (expect(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS, "begin", __LINE__), \
                        settle(call, #call))
        int before = refused;
        CAPTURED(cuModuleLoadData(&second, text));
        if (refused == before) CHECK(cuModuleUnload(second));
        CHECK(cuModuleLoadData(&second, text));
        before = refused;
        CAPTURED(cuModuleUnload(second));
        if (refused != before) CHECK(cuModuleUnload(second));
        before = refused;
        CAPTURED(cuLibraryLoadData(&library, text, NULL, NULL, 0, NULL, NULL, 0));
        if (refused == before) CHECK(cuLibraryUnload(library));
        CHECK(cuLinkCreate(0, NULL, NULL, &link));
        CHECK(cuLinkAddData(link, CU_JIT_INPUT_PTX, (void *)text, sizeof text, "text", 0, NULL, NULL));
        CAPTURED(cuLinkComplete(link, &image, NULL));
        CHECK(cuLinkDestroy(link));

        CUgraph graph;
        CUgraphExec exec;
        CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        for (int i = 0; i < 3; i++) CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
        CHECK(cuStreamEndCapture(stream, &graph));
        CHECK(cuGraphInstantiate(&exec, graph, 0));
        for (int i = 0; i < 4; i++) CHECK(cuGraphLaunch(exec, stream));
        CHECK(cuStreamSynchronize(stream));
        MUST(number_at(out, 0) == 12);
        launch(function, "more", 1, 1, parameters);
        MUST(number_at(out, 0) == 13);
        CHECK(cuGraphExecDestroy(exec));
        CHECK(cuGraphDestroy(graph));
    }
    printf("%d refused\n", refused);
    return 0;
}
