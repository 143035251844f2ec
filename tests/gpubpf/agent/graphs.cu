// What a program that looks closely at its graphs sees; printed, to be compared with and without the agent.
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>
__global__ void add(int *p, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; p[i] += n; }
__global__ void mul(int *p, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; p[i] *= n; }
#define C(x) do { int e_ = (int)(x); if (e_) printf("%s: %d\n", #x, e_); } while (0)
static int *p; static cudaStream_t s, t;
static void show(const char *what) { int h[8]; C(cudaStreamSynchronize(s)); C(cudaStreamSynchronize(t)); C(cudaMemcpy(h, p, sizeof h, cudaMemcpyDeviceToHost)); printf("%s: %d %d\n", what, h[0], h[7]); }
static CUfunction f_add, f_mul;
static const char *nm(CUfunction f) { const char *n = 0; if (!f) return "null"; if (cuFuncGetName(&n, f)) return "?"; return n; }
static void nodes(cudaGraph_t g) {
  CUgraphNode ns[32]; size_t n = 32; C(cuGraphGetNodes((CUgraph)g, ns, &n));
  for (size_t i = 0; i < n; ++i) { CUgraphNodeType ty; C(cuGraphNodeGetType(ns[i], &ty)); printf(" node type %d", ty);
    if (ty == CU_GRAPH_NODE_TYPE_KERNEL) { CUDA_KERNEL_NODE_PARAMS q; C(cuGraphKernelNodeGetParams(ns[i], &q));
      printf(" %s grid %u block %u own %d args %d", nm(q.func), q.gridDimX, q.blockDimX, q.func == f_add || q.func == f_mul, *(int *)q.kernelParams[1]);
      int regs=0; C(cuFuncGetAttribute(&regs, CU_FUNC_ATTRIBUTE_NUM_REGS, q.func)); printf(" regs %d", regs);
      CUgraphNode other; (void)other; }
    if (ty == CU_GRAPH_NODE_TYPE_GRAPH) { CUgraph c; C(cuGraphChildGraphNodeGetGraph(ns[i], &c)); printf("{\n"); nodes((cudaGraph_t)c); printf("}"); }
    printf("\n"); }
}
int main() {
  C(cudaMalloc(&p, 4096)); C(cudaMemset(p, 0, 4096)); C(cudaStreamCreate(&s)); C(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
  cudaFunction_t x; C(cudaGetFuncBySymbol(&x, (void *)add)); f_add = (CUfunction)x; C(cudaGetFuncBySymbol(&x, (void *)mul)); f_mul = (CUfunction)x;
  cudaGraph_t g; cudaGraphExec_t e;
  C(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  add<<<1, 8, 0, s>>>(p, 1); mul<<<1, 8, 0, s>>>(p, 2); add<<<1, 8, 0, s>>>(p, 3);
  C(cudaStreamEndCapture(s, &g));
  nodes(g);
  C(cudaGraphInstantiate(&e, g, 0));
  nodes(g);
  for (int i = 0; i < 3; ++i) C(cudaGraphLaunch(e, i == 1 ? t : s));
  show("captured");
  cudaGraphNode_t ns[8]; size_t n = 8; C(cudaGraphGetNodes(g, ns, &n));
  CUDA_KERNEL_NODE_PARAMS q; C(cuGraphKernelNodeGetParams((CUgraphNode)ns[0], &q));
  // hold the pointers over an instantiation, then use them on another node
  cudaGraphExec_t e2; C(cudaGraphInstantiate(&e2, g, 0));
  printf("held %d\n", *(int *)q.kernelParams[1]);
  *(int *)q.kernelParams[1] = 10;
  C(cuGraphExecKernelNodeSetParams((CUgraphExec)e2, (CUgraphNode)ns[1], &q));
  C(cudaGraphLaunch(e2, s)); show("set other");
  C(cudaGraphNodeSetEnabled(e2, ns[2], 0)); C(cudaGraphLaunch(e2, s)); show("disabled");
  // runtime's own
  cudaKernelNodeParams kp; C(cudaGraphKernelNodeGetParams(ns[1], &kp)); printf("rt func own %d\n", kp.func == (void *)mul);
  int five = 5; void *args[] = {&p, &five}; kp.func = (void *)mul; kp.kernelParams = args; kp.extra = 0;
  C(cudaGraphExecKernelNodeSetParams(e, ns[0], &kp)); C(cudaGraphLaunch(e, s)); show("rt set");
  C(cudaGraphKernelNodeSetParams(ns[0], &kp)); nodes(g);
  cudaGraphExecUpdateResultInfo info; C(cudaGraphExecUpdate(e2, g, &info)); printf("update %d\n", info.result); C(cudaGraphLaunch(e2, s)); show("updated");
  C(cudaGraphExecKernelNodeSetParams(e2, ns[0], &kp)); C(cudaGraphLaunch(e2, t)); show("updated, set");
  // child graph, clone
  cudaGraph_t outer, clone; C(cudaGraphCreate(&outer, 0)); cudaGraphNode_t a, b, c;
  C(cudaGraphAddChildGraphNode(&a, outer, 0, 0, g)); C(cudaGraphAddEmptyNode(&b, outer, &a, 1));
  cudaKernelNodeParams kq = kp; int two = 2; void *args2[] = {&p, &two}; kq.kernelParams = args2; kq.func = (void *)add; kq.gridDim = dim3(1); kq.blockDim = dim3(8); kq.sharedMemBytes = 0;
  C(cudaGraphAddKernelNode(&c, outer, &b, 1, &kq));
  C(cudaGraphClone(&clone, outer)); nodes(outer); nodes(clone);
  cudaGraphExec_t e3, e4; C(cudaGraphInstantiate(&e3, outer, 0)); C(cudaGraphInstantiate(&e4, clone, 0));
  C(cudaMemset(p, 0, 4096));
  C(cudaGraphLaunch(e3, s)); C(cudaGraphLaunch(e4, s)); show("child");
  nodes(outer);
  // the launch of an executable graph, captured
  C(cudaMemset(p, 0, 4096));
  cudaGraph_t h; cudaGraphExec_t e5;
  C(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed)); C(cudaGraphLaunch(e, s)); C(cudaStreamEndCapture(s, &h));
  nodes(h); C(cudaGraphInstantiate(&e5, h, 0)); C(cudaGraphLaunch(e5, s)); show("captured launch"); nodes(h);
  // what a node of an executable graph is replaced by as a whole
  cudaGraph_t other; C(cudaGraphCreate(&other, 0)); cudaGraphNode_t o[3];
  for (int i = 0; i < 3; ++i) { kq.func = (void *)(i == 1 ? add : mul); C(cudaGraphAddKernelNode(&o[i], other, i ? &o[i - 1] : 0, i > 0, &kq)); }
  C(cudaMemset(p, 0, 4096)); C(cudaGraphExecChildGraphNodeSetParams(e3, a, other)); C(cudaGraphLaunch(e3, s)); show("child set"); nodes(other); nodes(outer);
  // attributes, the new way to add, edges
  CUkernelNodeAttrValue v; memset(&v, 0, sizeof v); v.priority = -1;
  printf("attribute %d\n", cuGraphKernelNodeSetAttribute((CUgraphNode)o[0], CU_LAUNCH_ATTRIBUTE_PRIORITY, &v) == 0 ? 0 : 1);
  C(cuGraphKernelNodeCopyAttributes((CUgraphNode)o[1], (CUgraphNode)o[0]));
  memset(&v, 0, sizeof v); C(cuGraphKernelNodeGetAttribute((CUgraphNode)o[1], CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &v)); printf("cooperative %d\n", v.cooperative);
  CUgraphNodeParams np; memset(&np, 0, sizeof np); np.type = CU_GRAPH_NODE_TYPE_KERNEL; np.kernel.func = f_add; np.kernel.gridDimX = np.kernel.gridDimY = np.kernel.gridDimZ = 1;
  np.kernel.blockDimX = 8; np.kernel.blockDimY = np.kernel.blockDimZ = 1; struct { int *p; int n; } packed = {p, 7}; size_t size = sizeof packed - 4;
  void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END}; np.kernel.extra = extra;
  CUgraphNode last; CUgraphNode dep = (CUgraphNode)o[2]; C(cuGraphAddNode(&last, (CUgraph)other, &dep, 0, 1, &np));
  CUgraphNode from[8], to[8]; size_t m = 8; C(cuGraphGetEdges((CUgraph)other, from, to, 0, &m)); printf("edges %zu\n", m);
  CUDA_GRAPH_INSTANTIATE_PARAMS ip; memset(&ip, 0, sizeof ip); CUgraphExec e6; C(cuGraphInstantiateWithParams(&e6, (CUgraph)other, &ip)); printf("result %d\n", ip.result_out);
  C(cudaMemset(p, 0, 4096)); C(cuGraphLaunch(e6, 0)); C(cuGraphLaunch(e6, CU_STREAM_PER_THREAD)); C(cudaDeviceSynchronize()); show("parameters in a buffer");
  packed.n = 9; C(cuGraphExecNodeSetParams(e6, last, &np)); C(cuGraphLaunch(e6, 0)); show("set as a node");
  C(cudaGraphDestroyNode((cudaGraphNode_t)last)); CUgraphExecUpdateResultInfo ui; printf("update %d", cuGraphExecUpdate(e6, (CUgraph)other, &ui)); printf(" %d\n", ui.result);
  C(cuGraphLaunch(e6, 0)); show("not updated"); C(cuGraphExecDestroy(e6));
  C(cudaGraphDestroy(g)); C(cudaGraphExecDestroy(e)); C(cudaGraphLaunch(e2, s)); show("after destroy");
  printf("last error %d\n", cudaGetLastError());
  return 0;
}
