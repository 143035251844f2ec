"""The functions of CUDA that libcuda (the driver) and libcudart (the runtime) export.

Source: the headers of CUDA 13.0 (cuda.h, cuda_runtime_api.h, crt/host_runtime.h), including the older versions
of functions that they still declare. The layouts follow from the prototypes and the System V ABI.

In a program that is linked with the static runtime, only the calls of the driver are visible. If the shared
runtime calls a driver function for the program, that is a nested call.

A suffix in brackets stands for a second row: `cuLaunchKernel[_ptsz]` means cuLaunchKernel and
cuLaunchKernel_ptsz, which uses the per-thread default stream.
"""

from __future__ import annotations

import re

from gpubpf.calls.api import Api, parse_functions, parse_names
from gpubpf.record import replace

_VERSION = re.compile(r"_v\d+(?=_pt|$)")  # the suffix that the headers add with macros
_PER_THREAD_STREAM = re.compile(r"^ +(\w+)\[(_pt\w\w)\](.*)", re.M)
_FUNCTIONS = """
launch:
  cuLaunchKernel[_ptsz] kernel=0 grid=1 block=4 shared=s1 stream=s2
  cuLaunchKernelEx[_ptsz] kernel=1 grid=0@0 block=0@12 shared=0@24 stream=0@32
  cuLaunchCooperativeKernel[_ptsz] kernel=0 grid=1 block=4 shared=s1 stream=s2
  cuLaunchCooperativeKernelMultiDevice
  cuLaunch kernel=0
  cuLaunchGrid kernel=0
  cuLaunchGridAsync kernel=0 stream=3
  cuGraphLaunch[_ptsz] stream=1
  cudaLaunchKernel[_ptsz] kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
  cudaLaunchKernelExC[_ptsz] kernel=1 grid=0@0 block=0@12 shared=0@24 stream=0@32
  cudaLaunchCooperativeKernel[_ptsz] kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
  cudaGraphLaunch[_ptsz] stream=1
  __cudaLaunchKernel[_ptsz] kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
  cudaLaunchCooperativeKernelMultiDevice

memory:
  cuMemGetInfo_v2
  cuMemAlloc_v2 bytes=1 out=0
  cuMemAllocPitch_v2 bytes=2 count=3 out=0
  cuMemFree_v2
  cuMemAllocHost_v2 bytes=1 out=0
  cuMemFreeHost
  cuMemHostAlloc bytes=1 out=0
  cuMemHostGetDevicePointer_v2 out=0
  cuMemHostGetFlags
  cuMemAllocManaged bytes=1 out=0
  cuMemHostRegister_v2 bytes=1
  cuMemHostUnregister
  cuArrayCreate_v2 out=0
  cuArrayDestroy
  cuArray3DCreate_v2 out=0
  cuMipmappedArrayCreate out=0
  cuMipmappedArrayDestroy
  cuMemAddressReserve bytes=1 out=0
  cuMemAddressFree bytes=1
  cuMemCreate bytes=1 out=0
  cuMemRelease
  cuMemMap bytes=1
  cuMemMapArrayAsync[_ptsz] stream=2
  cuMemUnmap bytes=1
  cuMemSetAccess bytes=1
  cuMemExportToShareableHandle
  cuMemImportFromShareableHandle out=0
  cuMemRetainAllocationHandle out=0
  cuMemFreeAsync[_ptsz] stream=1
  cuMemAllocAsync[_ptsz] stream=2 bytes=1 out=0
  cuMemPoolTrimTo bytes=1
  cuMemPoolSetAttribute
  cuMemPoolSetAccess
  cuMemPoolCreate out=0
  cuMemPoolDestroy
  cuMemSetMemPool
  cuMemAllocFromPoolAsync[_ptsz] stream=3 bytes=1 out=0
  cuMemPoolExportToShareableHandle
  cuMemPoolImportFromShareableHandle out=0
  cuMemPoolExportPointer
  cuMemPoolImportPointer out=0
  cuMulticastCreate out=0
  cuMulticastAddDevice
  cuMulticastBindMem bytes=4
  cuMulticastBindAddr bytes=3
  cuMulticastUnbind bytes=3
  cuMemAdvise_v2 bytes=1
  cuPointerSetAttribute
  cuStreamAttachMemAsync[_ptsz] stream=0 bytes=2
  cuMemHostRegister bytes=1
  cuMemGetInfo
  cuMemAllocHost out=0
  cuMemAdvise bytes=1
  cudaStreamAttachMemAsync[_ptsz] stream=0 bytes=2
  cudaMallocManaged bytes=1 out=0
  cudaMalloc bytes=1 out=0
  cudaMallocHost bytes=1 out=0
  cudaMallocPitch bytes=2 count=3 out=0
  cudaMallocArray out=0
  cudaFree
  cudaFreeHost
  cudaFreeArray
  cudaFreeMipmappedArray
  cudaHostAlloc bytes=1 out=0
  cudaHostRegister bytes=1
  cudaHostUnregister
  cudaMalloc3D out=0
  cudaMalloc3DArray out=0
  cudaMallocMipmappedArray out=0
  cudaMemGetInfo
  cudaMemAdvise bytes=1
  cudaMallocAsync[_ptsz] stream=2 bytes=1 out=0
  cudaFreeAsync[_ptsz] stream=1
  cudaMemPoolTrimTo bytes=1
  cudaMemPoolSetAttribute
  cudaMemPoolSetAccess
  cudaMemPoolCreate out=0
  cudaMemPoolDestroy
  cudaMemSetMemPool
  cudaMallocFromPoolAsync[_ptsz] stream=3 bytes=1 out=0
  cudaMemPoolExportToShareableHandle
  cudaMemPoolImportFromShareableHandle out=0
  cudaMemPoolExportPointer
  cudaMemPoolImportPointer out=0

copy:
  cuMemcpy[_ptds] bytes=2
  cuMemcpyPeer[_ptds] bytes=4
  cuMemcpyHtoD_v2[_ptds] bytes=2
  cuMemcpyDtoH_v2[_ptds] bytes=2
  cuMemcpyDtoD_v2[_ptds] bytes=2
  cuMemcpyDtoA_v2[_ptds] bytes=3
  cuMemcpyAtoD_v2[_ptds] bytes=3
  cuMemcpyHtoA_v2[_ptds] bytes=3
  cuMemcpyAtoH_v2[_ptds] bytes=3
  cuMemcpyAtoA_v2[_ptds] bytes=4
  cuMemcpy2D_v2[_ptds] bytes=0@112 count=0@120
  cuMemcpy2DUnaligned_v2[_ptds] bytes=0@112 count=0@120
  cuMemcpy3D_v2[_ptds]
  cuMemcpy3DPeer[_ptds]
  cuMemcpyAsync[_ptsz] stream=3 bytes=2
  cuMemcpyPeerAsync[_ptsz] stream=5 bytes=4
  cuMemcpyHtoDAsync_v2[_ptsz] stream=3 bytes=2
  cuMemcpyDtoHAsync_v2[_ptsz] stream=3 bytes=2
  cuMemcpyDtoDAsync_v2[_ptsz] stream=3 bytes=2
  cuMemcpyHtoAAsync_v2[_ptsz] stream=4 bytes=3
  cuMemcpyAtoHAsync_v2[_ptsz] stream=4 bytes=3
  cuMemcpy2DAsync_v2[_ptsz] stream=1 bytes=0@112 count=0@120
  cuMemcpy3DAsync_v2[_ptsz] stream=1
  cuMemcpy3DPeerAsync[_ptsz] stream=1
  cuMemcpyBatchAsync_v2[_ptsz] stream=s1
  cuMemcpy3DBatchAsync_v2[_ptsz] stream=3
  cuMemsetD8_v2[_ptds] bytes=2
  cuMemsetD16_v2[_ptds] bytes=2 count=#2
  cuMemsetD32_v2[_ptds] bytes=2 count=#4
  cuMemsetD2D8_v2[_ptds] bytes=3 count=4
  cuMemsetD2D16_v2[_ptds]
  cuMemsetD2D32_v2[_ptds]
  cuMemsetD8Async[_ptsz] stream=3 bytes=2
  cuMemsetD16Async[_ptsz] stream=3 bytes=2 count=#2
  cuMemsetD32Async[_ptsz] stream=3 bytes=2 count=#4
  cuMemsetD2D8Async[_ptsz] bytes=3 count=4 stream=5
  cuMemsetD2D16Async[_ptsz] stream=5
  cuMemsetD2D32Async[_ptsz] stream=5
  cuMemBatchDecompressAsync[_ptsz] stream=4
  cuMemPrefetchAsync_v2[_ptsz] stream=4 bytes=1
  cuMemPrefetchBatchAsync[_ptsz] stream=s1
  cuMemDiscardBatchAsync[_ptsz] stream=4
  cuMemDiscardAndPrefetchBatchAsync[_ptsz] stream=s1
  cuMemcpyHtoA
  cuMemcpyAtoH
  cuMemcpyAtoA
  cuMemcpyHtoAAsync stream=4
  cuMemcpyAtoHAsync stream=4
  cuMemcpyBatchAsync[_ptsz] stream=s2
  cuMemcpy3DBatchAsync[_ptsz] stream=4
  cuMemPrefetchAsync[_ptsz] stream=3 bytes=1
  cudaMemcpy3D[_ptds] copy=0@152
  cudaMemcpy3DPeer[_ptds]
  cudaMemcpy3DAsync[_ptsz] stream=1 copy=0@152
  cudaMemcpy3DPeerAsync[_ptsz] stream=1
  cudaMemcpy[_ptds] bytes=2 copy=3
  cudaMemcpyPeer bytes=4
  cudaMemcpy2D[_ptds] bytes=4 count=5 copy=s0
  cudaMemcpy2DToArray[_ptds] bytes=5 count=s0 copy=s1
  cudaMemcpy2DFromArray[_ptds] bytes=5 count=s0 copy=s1
  cudaMemcpy2DArrayToArray[_ptds] bytes=s0 count=s1 copy=s2
  cudaMemcpyToSymbol[_ptds] bytes=2 copy=4
  cudaMemcpyFromSymbol[_ptds] bytes=2 copy=4
  cudaMemcpyAsync[_ptsz] stream=4 bytes=2 copy=3
  cudaMemcpyPeerAsync stream=5 bytes=4
  cudaMemcpyBatchAsync[_ptsz] stream=s1
  cudaMemcpy3DBatchAsync[_ptsz] stream=3
  cudaMemcpy2DAsync[_ptsz] stream=s1 bytes=4 count=5 copy=s0
  cudaMemcpy2DToArrayAsync[_ptsz] stream=s2 bytes=5 count=s0 copy=s1
  cudaMemcpy2DFromArrayAsync[_ptsz] stream=s2 bytes=5 count=s0 copy=s1
  cudaMemcpyToSymbolAsync[_ptsz] stream=5 bytes=2 copy=4
  cudaMemcpyFromSymbolAsync[_ptsz] stream=5 bytes=2 copy=4
  cudaMemset[_ptds] bytes=2
  cudaMemset2D[_ptds] bytes=3 count=4
  cudaMemset3D[_ptds]
  cudaMemsetAsync[_ptsz] stream=3 bytes=2
  cudaMemset2DAsync[_ptsz] stream=5 bytes=3 count=4
  cudaMemset3DAsync[_ptsz] stream=1
  cudaMemPrefetchAsync[_ptsz] bytes=1
  cudaMemPrefetchBatchAsync[_ptsz] stream=s1
  cudaMemDiscardBatchAsync[_ptsz] stream=4
  cudaMemDiscardAndPrefetchBatchAsync[_ptsz] stream=s1
  cudaMemcpyToArray[_ptds] bytes=4 copy=5
  cudaMemcpyFromArray[_ptds] bytes=4 copy=5
  cudaMemcpyArrayToArray[_ptds] bytes=s0 copy=s1
  cudaMemcpyToArrayAsync[_ptsz] stream=s0 bytes=4 copy=5
  cudaMemcpyFromArrayAsync[_ptsz] stream=s0 bytes=4 copy=5
  cudaMemPrefetchAsync_v2 bytes=1 stream=4

sync:
  cuGreenCtxWaitEvent
  cuCtxSynchronize
  cuCtxSynchronize_v2
  cuCtxWaitEvent
  cuStreamWaitEvent[_ptsz] stream=0
  cuStreamSynchronize[_ptsz] stream=0
  cuEventSynchronize
  cudaDeviceSynchronize
  cudaStreamWaitEvent[_ptsz] stream=0
  cudaStreamSynchronize[_ptsz] stream=0
  cudaEventSynchronize
  cudaThreadSynchronize

stream:
  cuStreamCreate out=0
  cuStreamCreateWithPriority out=0
  cuStreamAddCallback[_ptsz] stream=0
  cuStreamQuery[_ptsz] returns=query stream=0
  cuStreamDestroy_v2 stream=0
  cuStreamWaitValue32_v2[_ptsz] stream=0
  cuStreamWaitValue64_v2[_ptsz] stream=0
  cuStreamWriteValue32_v2[_ptsz] stream=0
  cuStreamWriteValue64_v2[_ptsz] stream=0
  cuStreamBatchMemOp_v2[_ptsz] stream=0
  cuLaunchHostFunc[_ptsz] stream=0
  cuStreamDestroy stream=0
  cuStreamWriteValue32[_ptsz] stream=0
  cuStreamWaitValue32[_ptsz] stream=0
  cuStreamWriteValue64[_ptsz] stream=0
  cuStreamWaitValue64[_ptsz] stream=0
  cuStreamBatchMemOp[_ptsz] stream=0
  cudaStreamCreate out=0
  cudaStreamCreateWithFlags out=0
  cudaStreamCreateWithPriority out=0
  cudaStreamDestroy stream=0
  cudaStreamAddCallback[_ptsz] stream=0
  cudaStreamQuery[_ptsz] returns=query stream=0
  cudaLaunchHostFunc[_ptsz] stream=0

event:
  cuEventCreate out=0
  cuEventRecord[_ptsz] stream=1
  cuEventRecordWithFlags[_ptsz] stream=1
  cuEventQuery returns=query
  cuEventDestroy_v2
  cuEventElapsedTime_v2 returns=query
  cuEventDestroy
  cuEventElapsedTime returns=query
  cudaEventCreate out=0
  cudaEventCreateWithFlags out=0
  cudaEventRecord[_ptsz] stream=1
  cudaEventRecordWithFlags[_ptsz] stream=1
  cudaEventQuery returns=query
  cudaEventDestroy
  cudaEventElapsedTime returns=query
  cudaEventElapsedTime_v2 returns=query

graph:
  cuStreamBeginCapture_v2[_ptsz] stream=0
  cuStreamBeginCaptureToGraph[_ptsz] stream=0
  cuStreamEndCapture[_ptsz] stream=0 out=1
  cuStreamUpdateCaptureDependencies_v2[_ptsz] stream=0
  cuGraphCreate out=0
  cuGraphAddKernelNode_v2 out=0
  cuGraphKernelNodeSetParams_v2
  cuGraphAddMemcpyNode out=0
  cuGraphMemcpyNodeSetParams
  cuGraphAddMemsetNode out=0
  cuGraphMemsetNodeSetParams
  cuGraphAddHostNode out=0
  cuGraphHostNodeSetParams
  cuGraphAddChildGraphNode out=0
  cuGraphAddEmptyNode out=0
  cuGraphAddEventRecordNode out=0
  cuGraphEventRecordNodeSetEvent
  cuGraphAddEventWaitNode out=0
  cuGraphEventWaitNodeSetEvent
  cuGraphAddExternalSemaphoresSignalNode out=0
  cuGraphExternalSemaphoresSignalNodeSetParams
  cuGraphAddExternalSemaphoresWaitNode out=0
  cuGraphExternalSemaphoresWaitNodeSetParams
  cuGraphAddBatchMemOpNode out=0
  cuGraphBatchMemOpNodeSetParams
  cuGraphExecBatchMemOpNodeSetParams
  cuGraphAddMemAllocNode out=0
  cuGraphAddMemFreeNode out=0
  cuGraphClone out=0
  cuGraphNodeFindInClone out=0
  cuGraphAddDependencies_v2
  cuGraphRemoveDependencies_v2
  cuGraphDestroyNode
  cuGraphInstantiateWithFlags out=0
  cuGraphInstantiateWithParams[_ptsz] out=0
  cuGraphExecKernelNodeSetParams_v2
  cuGraphExecMemcpyNodeSetParams
  cuGraphExecMemsetNodeSetParams
  cuGraphExecHostNodeSetParams
  cuGraphExecChildGraphNodeSetParams
  cuGraphExecEventRecordNodeSetEvent
  cuGraphExecEventWaitNodeSetEvent
  cuGraphExecExternalSemaphoresSignalNodeSetParams
  cuGraphExecExternalSemaphoresWaitNodeSetParams
  cuGraphNodeSetEnabled
  cuGraphUpload[_ptsz] stream=1
  cuGraphExecDestroy
  cuGraphDestroy
  cuGraphExecUpdate_v2
  cuGraphKernelNodeCopyAttributes
  cuGraphKernelNodeSetAttribute
  cuGraphDebugDotPrint
  cuGraphRetainUserObject
  cuGraphReleaseUserObject
  cuGraphAddNode_v2 out=0
  cuGraphNodeSetParams
  cuGraphExecNodeSetParams
  cuGraphConditionalHandleCreate out=0
  cuStreamBeginCapture[_ptsz] stream=0
  cuGraphExecUpdate
  cuGraphAddDependencies
  cuGraphRemoveDependencies
  cuGraphAddNode out=0
  cuGraphInstantiate out=0
  cuGraphInstantiate_v2 out=0
  cuStreamUpdateCaptureDependencies[_ptsz] stream=0
  cudaStreamBeginCapture[_ptsz] stream=0
  cudaStreamBeginCaptureToGraph[_ptsz] stream=0
  cudaStreamEndCapture[_ptsz] stream=0 out=1
  cudaStreamUpdateCaptureDependencies[_ptsz] stream=0
  cudaGraphCreate out=0
  cudaGraphAddKernelNode out=0
  cudaGraphKernelNodeSetParams
  cudaGraphKernelNodeCopyAttributes
  cudaGraphKernelNodeSetAttribute
  cudaGraphAddMemcpyNode out=0
  cudaGraphAddMemcpyNodeToSymbol bytes=s0 copy=s2 out=0
  cudaGraphAddMemcpyNodeFromSymbol bytes=s0 copy=s2 out=0
  cudaGraphAddMemcpyNode1D bytes=s0 copy=s1 out=0
  cudaGraphMemcpyNodeSetParams
  cudaGraphMemcpyNodeSetParamsToSymbol bytes=3 copy=5
  cudaGraphMemcpyNodeSetParamsFromSymbol bytes=3 copy=5
  cudaGraphMemcpyNodeSetParams1D bytes=3 copy=4
  cudaGraphAddMemsetNode out=0
  cudaGraphMemsetNodeSetParams
  cudaGraphAddHostNode out=0
  cudaGraphHostNodeSetParams
  cudaGraphAddChildGraphNode out=0
  cudaGraphAddEmptyNode out=0
  cudaGraphAddEventRecordNode out=0
  cudaGraphEventRecordNodeSetEvent
  cudaGraphAddEventWaitNode out=0
  cudaGraphEventWaitNodeSetEvent
  cudaGraphAddExternalSemaphoresSignalNode out=0
  cudaGraphExternalSemaphoresSignalNodeSetParams
  cudaGraphAddExternalSemaphoresWaitNode out=0
  cudaGraphExternalSemaphoresWaitNodeSetParams
  cudaGraphAddMemAllocNode out=0
  cudaGraphAddMemFreeNode out=0
  cudaGraphClone out=0
  cudaGraphNodeFindInClone out=0
  cudaGraphAddDependencies
  cudaGraphRemoveDependencies
  cudaGraphDestroyNode
  cudaGraphInstantiate out=0
  cudaGraphInstantiateWithFlags out=0
  cudaGraphInstantiateWithParams[_ptsz] out=0
  cudaGraphExecKernelNodeSetParams
  cudaGraphExecMemcpyNodeSetParams
  cudaGraphExecMemcpyNodeSetParamsToSymbol bytes=4 copy=s0
  cudaGraphExecMemcpyNodeSetParamsFromSymbol bytes=4 copy=s0
  cudaGraphExecMemcpyNodeSetParams1D bytes=4 copy=5
  cudaGraphExecMemsetNodeSetParams
  cudaGraphExecHostNodeSetParams
  cudaGraphExecChildGraphNodeSetParams
  cudaGraphExecEventRecordNodeSetEvent
  cudaGraphExecEventWaitNodeSetEvent
  cudaGraphExecExternalSemaphoresSignalNodeSetParams
  cudaGraphExecExternalSemaphoresWaitNodeSetParams
  cudaGraphNodeSetEnabled
  cudaGraphExecUpdate
  cudaGraphUpload[_ptsz] stream=1
  cudaGraphExecDestroy
  cudaGraphDestroy
  cudaGraphDebugDotPrint
  cudaGraphRetainUserObject
  cudaGraphReleaseUserObject
  cudaGraphAddNode out=0
  cudaGraphNodeSetParams
  cudaGraphExecNodeSetParams
  cudaGraphConditionalHandleCreate out=0

module:
  cuModuleLoad out=0 name=1
  cuModuleLoadData out=0
  cuModuleLoadDataEx out=0
  cuModuleLoadFatBinary out=0
  cuModuleUnload
  cuModuleGetFunction kernel_name=by_name out=0 name=2
  cuModuleGetGlobal_v2 out=0 name=3
  cuLinkCreate_v2 out=3
  cuLinkAddData_v2 name=4
  cuLinkAddFile_v2
  cuLinkComplete out=1
  cuLinkDestroy
  cuModuleGetTexRef out=0 name=2
  cuModuleGetSurfRef out=0 name=2
  cuLibraryLoadData out=0
  cuLibraryLoadFromFile out=0 name=1
  cuLibraryUnload
  cuLibraryGetKernel kernel_name=by_name out=0 name=2
  cuKernelGetFunction kernel_name=by_handle out=0
  cuLibraryGetGlobal out=0 name=3
  cuLibraryGetManaged out=0 name=3
  cuLibraryGetUnifiedFunction
  cuKernelSetAttribute
  cuKernelSetCacheConfig
  cuFuncSetAttribute
  cuFuncSetCacheConfig
  cuFuncLoad
  cuFuncSetSharedMemConfig
  cuLinkCreate out=3
  cuLinkAddData name=4
  cuLinkAddFile
  cudaFuncSetCacheConfig
  cudaFuncSetAttribute
  cudaFuncSetSharedMemConfig
  cudaGetSymbolAddress out=0
  cudaLibraryLoadData out=0
  cudaLibraryLoadFromFile out=0 name=1
  cudaLibraryUnload
  cudaLibraryGetKernel kernel_name=by_name out=0 name=2
  cudaLibraryGetGlobal out=0 name=3
  cudaLibraryGetManaged out=0 name=3
  cudaLibraryGetUnifiedFunction
  cudaKernelSetAttributeForDevice
  cudaGetFuncBySymbol kernel_name=by_handle out=0
  cudaGetKernel kernel_name=by_handle out=0
  cuOccupancyMaxActiveBlocksPerMultiprocessor
  cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
  cuOccupancyMaxPotentialBlockSize
  cuOccupancyMaxPotentialBlockSizeWithFlags
  cuOccupancyAvailableDynamicSMemPerBlock
  cuOccupancyMaxPotentialClusterSize
  cuOccupancyMaxActiveClusters
  cudaOccupancyMaxActiveBlocksPerMultiprocessor
  cudaOccupancyAvailableDynamicSMemPerBlock
  cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
  cudaOccupancyMaxPotentialClusterSize
  cudaOccupancyMaxActiveClusters

device:
  cuInit
  cuDeviceSetMemPool
  cuFlushGPUDirectRDMAWrites
  cuDevicePrimaryCtxRetain out=0
  cuDevicePrimaryCtxRelease_v2
  cuDevicePrimaryCtxSetFlags_v2
  cuDevicePrimaryCtxReset_v2
  cuCtxCreate_v4 out=0
  cuCtxDestroy_v2
  cuCtxSetCacheConfig
  cuCtxResetPersistingL2Cache
  cuCtxRecordEvent
  cuCtxAttach
  cuCtxDetach
  cuCtxSetSharedMemConfig
  cuDeviceRegisterAsyncNotification
  cuDeviceUnregisterAsyncNotification
  cuDeviceGraphMemTrim
  cuDeviceSetGraphMemAttribute
  cuCtxEnablePeerAccess
  cuCtxDisablePeerAccess
  cuGreenCtxCreate out=0
  cuGreenCtxDestroy
  cuGreenCtxRecordEvent
  cuGreenCtxStreamCreate out=0
  cuCtxCreate out=0
  cuCtxCreate_v2 out=0
  cuCtxCreate_v3 out=0
  cuCtxDestroy
  cuDevicePrimaryCtxRelease
  cuDevicePrimaryCtxReset
  cuDevicePrimaryCtxSetFlags
  cudaDeviceReset
  cudaDeviceSetLimit
  cudaDeviceSetCacheConfig
  cudaDeviceFlushGPUDirectRDMAWrites
  cudaDeviceRegisterAsyncNotification
  cudaDeviceUnregisterAsyncNotification
  cudaDeviceSetSharedMemConfig
  cudaGetDeviceProperties
  cudaDeviceSetMemPool
  cudaChooseDevice
  cudaInitDevice
  cudaSetValidDevices
  cudaSetDeviceFlags
  cudaCtxResetPersistingL2Cache
  cudaDeviceEnablePeerAccess
  cudaDeviceDisablePeerAccess
  cudaDeviceGraphMemTrim
  cudaDeviceSetGraphMemAttribute
  cudaProfilerStart
  cudaProfilerStop
  cuProfilerStart
  cuProfilerStop
  cuProfilerInitialize
  cudaThreadExit

other:
  cuIpcOpenEventHandle out=0
  cuIpcOpenMemHandle_v2 out=0
  cuIpcCloseMemHandle
  cuImportExternalMemory out=0
  cuExternalMemoryGetMappedBuffer out=0
  cuExternalMemoryGetMappedMipmappedArray out=0
  cuDestroyExternalMemory
  cuImportExternalSemaphore out=0
  cuSignalExternalSemaphoresAsync[_ptsz] stream=3
  cuWaitExternalSemaphoresAsync[_ptsz] stream=3
  cuDestroyExternalSemaphore
  cuTexRefSetArray
  cuTexRefSetMipmappedArray
  cuTexRefSetAddress_v2
  cuTexRefSetAddress2D_v3
  cuTexRefSetFormat
  cuTexRefSetAddressMode
  cuTexRefSetFilterMode
  cuTexRefSetMipmapFilterMode
  cuTexRefSetMipmapLevelBias
  cuTexRefSetMipmapLevelClamp
  cuTexRefSetMaxAnisotropy
  cuTexRefSetBorderColor
  cuTexRefSetFlags
  cuTexRefCreate out=0
  cuTexRefDestroy
  cuSurfRefSetArray
  cuTexObjectCreate out=0
  cuTexObjectDestroy
  cuTexObjectGetResourceDesc
  cuTexObjectGetTextureDesc
  cuTexObjectGetResourceViewDesc
  cuSurfObjectCreate out=0
  cuSurfObjectDestroy
  cuTensorMapReplaceAddress
  cuGraphicsUnregisterResource
  cuGraphicsSubResourceGetMappedArray out=0
  cuGraphicsResourceGetMappedMipmappedArray out=0
  cuGraphicsResourceGetMappedPointer_v2 out=0
  cuGraphicsResourceSetMapFlags_v2
  cuGraphicsMapResources[_ptsz] stream=2
  cuGraphicsUnmapResources[_ptsz] stream=2
  cuCoredumpSetAttribute
  cuCoredumpSetAttributeGlobal
  cuCheckpointProcessLock
  cuCheckpointProcessCheckpoint
  cuCheckpointProcessRestore
  cuCheckpointProcessUnlock
  cuGraphicsResourceSetMapFlags
  cuTexRefSetAddress2D_v2
  cuIpcOpenMemHandle out=0
  cudaIpcOpenEventHandle out=0
  cudaIpcOpenMemHandle out=0
  cudaIpcCloseMemHandle
  cudaImportExternalMemory out=0
  cudaExternalMemoryGetMappedBuffer out=0
  cudaExternalMemoryGetMappedMipmappedArray out=0
  cudaDestroyExternalMemory
  cudaImportExternalSemaphore out=0
  cudaSignalExternalSemaphoresAsync[_ptsz] stream=3
  cudaWaitExternalSemaphoresAsync[_ptsz] stream=3
  cudaDestroyExternalSemaphore
  cudaGraphicsUnregisterResource
  cudaGraphicsResourceSetMapFlags
  cudaGraphicsMapResources stream=2
  cudaGraphicsUnmapResources stream=2
  cudaGraphicsResourceGetMappedPointer out=0
  cudaGraphicsSubResourceGetMappedArray out=0
  cudaGraphicsResourceGetMappedMipmappedArray out=0
  cudaCreateTextureObject out=0
  cudaDestroyTextureObject
  cudaCreateSurfaceObject out=0
  cudaDestroySurfaceObject
  cuEGLStreamConsumerAcquireFrame
  cuEGLStreamConsumerConnect
  cuEGLStreamConsumerConnectWithFlags
  cuEGLStreamConsumerDisconnect
  cuEGLStreamConsumerReleaseFrame
  cuEGLStreamProducerConnect
  cuEGLStreamProducerDisconnect
  cuEGLStreamProducerPresentFrame
  cuEGLStreamProducerReturnFrame
  cuEventCreateFromEGLSync out=0
  cuGLCtxCreate_v2
  cuGLGetDevices_v2
  cuGLInit
  cuGLMapBufferObjectAsync_v2 stream=3
  cuGLMapBufferObject_v2
  cuGLRegisterBufferObject
  cuGLSetBufferObjectMapFlags
  cuGLUnmapBufferObject
  cuGLUnmapBufferObjectAsync stream=1
  cuGLUnregisterBufferObject
  cuGraphicsEGLRegisterImage out=0
  cuGraphicsGLRegisterBuffer out=0
  cuGraphicsGLRegisterImage out=0
  cuGraphicsResourceGetMappedEglFrame
  cuGraphicsVDPAURegisterOutputSurface out=0
  cuGraphicsVDPAURegisterVideoSurface out=0
  cuVDPAUCtxCreate_v2
  cuVDPAUGetDevice
  cuWGLGetDevice
  cudaEGLStreamConsumerAcquireFrame
  cudaEGLStreamConsumerConnect
  cudaEGLStreamConsumerConnectWithFlags
  cudaEGLStreamConsumerDisconnect
  cudaEGLStreamConsumerReleaseFrame
  cudaEGLStreamProducerConnect
  cudaEGLStreamProducerDisconnect
  cudaEGLStreamProducerPresentFrame
  cudaEGLStreamProducerReturnFrame
  cudaEventCreateFromEGLSync out=0
  cudaGLGetDevices
  cudaGLMapBufferObject
  cudaGLMapBufferObjectAsync stream=2
  cudaGLRegisterBufferObject
  cudaGLSetBufferObjectMapFlags
  cudaGLSetGLDevice
  cudaGLUnmapBufferObject
  cudaGLUnmapBufferObjectAsync stream=1
  cudaGLUnregisterBufferObject
  cudaGraphicsEGLRegisterImage out=0
  cudaGraphicsGLRegisterBuffer out=0
  cudaGraphicsGLRegisterImage out=0
  cudaGraphicsResourceGetMappedEglFrame
  cudaGraphicsVDPAURegisterOutputSurface out=0
  cudaGraphicsVDPAURegisterVideoSurface out=0
  cudaVDPAUGetDevice
  cudaVDPAUSetVDPAUDevice
  cudaWGLGetDevice

trivial:
  cuGetErrorString
  cuGetErrorName
  cuDriverGetVersion
  cuDeviceGet
  cuDeviceGetCount
  cuDeviceGetName
  cuDeviceGetUuid_v2
  cuDeviceGetLuid
  cuDeviceTotalMem_v2
  cuDeviceGetTexture1DLinearMaxWidth
  cuDeviceGetAttribute
  cuDeviceGetHostAtomicCapabilities
  cuDeviceGetNvSciSyncAttributes
  cuDeviceGetMemPool
  cuDeviceGetDefaultMemPool
  cuDeviceGetExecAffinitySupport
  cuDeviceGetProperties
  cuDeviceComputeCapability
  cuDevicePrimaryCtxGetState
  cuCtxPushCurrent_v2
  cuCtxPopCurrent_v2
  cuCtxSetCurrent
  cuCtxGetCurrent
  cuCtxGetDevice
  cuCtxGetDevice_v2
  cuCtxGetFlags
  cuCtxSetFlags
  cuCtxGetId
  cuCtxSetLimit
  cuCtxGetLimit
  cuCtxGetCacheConfig
  cuCtxGetApiVersion
  cuCtxGetStreamPriorityRange
  cuCtxGetExecAffinity
  cuCtxGetSharedMemConfig
  cuModuleGetLoadingMode
  cuModuleGetFunctionCount
  cuModuleEnumerateFunctions
  cuLibraryGetKernelCount
  cuLibraryEnumerateKernels
  cuLibraryGetModule
  cuKernelGetLibrary
  cuKernelGetAttribute
  cuKernelGetName
  cuKernelGetParamInfo
  cuMemGetAddressRange_v2
  cuDeviceGetByPCIBusId
  cuDeviceGetPCIBusId
  cuIpcGetEventHandle
  cuIpcGetMemHandle
  cuArrayGetDescriptor_v2
  cuArrayGetSparseProperties
  cuMipmappedArrayGetSparseProperties
  cuArrayGetMemoryRequirements
  cuMipmappedArrayGetMemoryRequirements
  cuArrayGetPlane
  cuArray3DGetDescriptor_v2
  cuMipmappedArrayGetLevel
  cuMemGetHandleForAddressRange
  cuMemGetAccess
  cuMemGetAllocationGranularity
  cuMemGetAllocationPropertiesFromHandle
  cuMemPoolGetAttribute
  cuMemPoolGetAccess
  cuMemGetDefaultMemPool
  cuMemGetMemPool
  cuMulticastGetGranularity
  cuPointerGetAttribute
  cuMemRangeGetAttribute
  cuMemRangeGetAttributes
  cuPointerGetAttributes
  cuStreamGetPriority[_ptsz] stream=0
  cuStreamGetDevice[_ptsz] stream=0
  cuStreamGetFlags[_ptsz] stream=0
  cuStreamGetId[_ptsz] stream=0
  cuStreamGetCtx[_ptsz] stream=0
  cuStreamGetCtx_v2[_ptsz] stream=0
  cuThreadExchangeStreamCaptureMode
  cuStreamIsCapturing[_ptsz] stream=0
  cuStreamGetCaptureInfo_v3[_ptsz] stream=0
  cuStreamCopyAttributes[_ptsz] stream=0
  cuStreamGetAttribute[_ptsz] stream=0
  cuStreamSetAttribute[_ptsz] stream=0
  cuFuncGetAttribute
  cuFuncGetModule
  cuFuncGetName
  cuFuncGetParamInfo
  cuFuncIsLoaded
  cuFuncSetBlockShape
  cuFuncSetSharedSize
  cuParamSetSize
  cuParamSeti
  cuParamSetf
  cuParamSetv
  cuParamSetTexRef
  cuGraphKernelNodeGetParams_v2
  cuGraphMemcpyNodeGetParams
  cuGraphMemsetNodeGetParams
  cuGraphHostNodeGetParams
  cuGraphChildGraphNodeGetGraph
  cuGraphEventRecordNodeGetEvent
  cuGraphEventWaitNodeGetEvent
  cuGraphExternalSemaphoresSignalNodeGetParams
  cuGraphExternalSemaphoresWaitNodeGetParams
  cuGraphBatchMemOpNodeGetParams
  cuGraphMemAllocNodeGetParams
  cuGraphMemFreeNodeGetParams
  cuDeviceGetGraphMemAttribute
  cuGraphNodeGetType
  cuGraphGetNodes
  cuGraphGetRootNodes
  cuGraphGetEdges_v2
  cuGraphNodeGetDependencies_v2
  cuGraphNodeGetDependentNodes_v2
  cuGraphExecGetFlags
  cuGraphNodeGetEnabled
  cuGraphKernelNodeGetAttribute
  cuUserObjectCreate out=0
  cuUserObjectRetain
  cuUserObjectRelease
  cuTexRefGetAddress_v2
  cuTexRefGetArray
  cuTexRefGetMipmappedArray
  cuTexRefGetAddressMode
  cuTexRefGetFilterMode
  cuTexRefGetFormat
  cuTexRefGetMipmapFilterMode
  cuTexRefGetMipmapLevelBias
  cuTexRefGetMipmapLevelClamp
  cuTexRefGetMaxAnisotropy
  cuTexRefGetBorderColor
  cuTexRefGetFlags
  cuSurfRefGetArray
  cuSurfObjectGetResourceDesc
  cuTensorMapEncodeTiled
  cuTensorMapEncodeIm2col
  cuTensorMapEncodeIm2colWide
  cuDeviceCanAccessPeer
  cuDeviceGetP2PAttribute
  cuDeviceGetP2PAtomicCapabilities
  cuGetProcAddress_v2
  cuCoredumpGetAttribute
  cuCoredumpGetAttributeGlobal
  cuGetExportTable
  cuCtxFromGreenCtx
  cuDeviceGetDevResource
  cuCtxGetDevResource
  cuGreenCtxGetDevResource
  cuDevSmResourceSplitByCount
  cuDevResourceGenerateDesc
  cuStreamGetGreenCtx stream=0
  cuGreenCtxGetId
  cuLogsRegisterCallback
  cuLogsUnregisterCallback
  cuLogsCurrent
  cuLogsDumpToFile
  cuLogsDumpToMemory
  cuCheckpointProcessGetRestoreThreadId
  cuCheckpointProcessGetState
  cuDeviceTotalMem
  cuCtxPopCurrent
  cuCtxPushCurrent
  cuDeviceGetUuid
  cuStreamGetCaptureInfo[_ptsz] stream=0
  cuStreamGetCaptureInfo_v2[_ptsz] stream=0
  cuGraphGetEdges
  cuGraphNodeGetDependencies
  cuGraphNodeGetDependentNodes
  cuGetProcAddress
  cudaDeviceGetLimit
  cudaDeviceGetTexture1DLinearMaxWidth
  cudaDeviceGetCacheConfig
  cudaDeviceGetStreamPriorityRange
  cudaDeviceGetByPCIBusId
  cudaDeviceGetPCIBusId
  cudaIpcGetEventHandle
  cudaIpcGetMemHandle
  cudaDeviceGetSharedMemConfig
  cudaGetLastError
  cudaPeekAtLastError
  cudaGetErrorName returns=other
  cudaGetErrorString returns=other
  cudaGetDeviceCount
  cudaDeviceGetAttribute
  cudaDeviceGetHostAtomicCapabilities
  cudaDeviceGetDefaultMemPool
  cudaDeviceGetMemPool
  cudaDeviceGetNvSciSyncAttributes
  cudaDeviceGetP2PAttribute
  cudaDeviceGetP2PAtomicCapabilities
  cudaSetDevice
  cudaGetDevice
  cudaGetDeviceFlags
  cudaStreamGetPriority[_ptsz] stream=0
  cudaStreamGetFlags[_ptsz] stream=0
  cudaStreamGetId[_ptsz] stream=0
  cudaStreamGetDevice[_ptsz] stream=0
  cudaStreamCopyAttributes[_ptsz] stream=0
  cudaStreamGetAttribute[_ptsz] stream=0
  cudaStreamSetAttribute[_ptsz] stream=0
  cudaThreadExchangeStreamCaptureMode
  cudaStreamIsCapturing[_ptsz] stream=0
  cudaStreamGetCaptureInfo[_ptsz] stream=0
  cudaFuncGetAttributes
  cudaFuncGetName
  cudaFuncGetParamInfo
  cudaHostGetDevicePointer out=0
  cudaHostGetFlags
  cudaGetMipmappedArrayLevel
  cudaArrayGetInfo
  cudaArrayGetPlane
  cudaArrayGetMemoryRequirements
  cudaMipmappedArrayGetMemoryRequirements
  cudaArrayGetSparseProperties
  cudaMipmappedArrayGetSparseProperties
  cudaGetSymbolSize
  cudaMemRangeGetAttribute
  cudaMemRangeGetAttributes
  cudaMemPoolGetAttribute
  cudaMemPoolGetAccess
  cudaMemGetDefaultMemPool
  cudaMemGetMemPool
  cudaPointerGetAttributes
  cudaDeviceCanAccessPeer
  cudaGetChannelDesc
  cudaGetTextureObjectResourceDesc
  cudaGetTextureObjectTextureDesc
  cudaGetTextureObjectResourceViewDesc
  cudaGetSurfaceObjectResourceDesc
  cudaDriverGetVersion
  cudaRuntimeGetVersion
  cudaLogsRegisterCallback
  cudaLogsUnregisterCallback
  cudaLogsCurrent
  cudaLogsDumpToFile
  cudaLogsDumpToMemory
  cudaGraphKernelNodeGetParams
  cudaGraphKernelNodeGetAttribute
  cudaGraphMemcpyNodeGetParams
  cudaGraphMemsetNodeGetParams
  cudaGraphHostNodeGetParams
  cudaGraphChildGraphNodeGetGraph
  cudaGraphEventRecordNodeGetEvent
  cudaGraphEventWaitNodeGetEvent
  cudaGraphExternalSemaphoresSignalNodeGetParams
  cudaGraphExternalSemaphoresWaitNodeGetParams
  cudaGraphMemAllocNodeGetParams
  cudaGraphMemFreeNodeGetParams
  cudaDeviceGetGraphMemAttribute
  cudaGraphNodeGetType
  cudaGraphGetNodes
  cudaGraphGetRootNodes
  cudaGraphGetEdges
  cudaGraphNodeGetDependencies
  cudaGraphNodeGetDependentNodes
  cudaGraphExecGetFlags
  cudaGraphNodeGetEnabled
  cudaUserObjectCreate out=0
  cudaUserObjectRetain
  cudaUserObjectRelease
  cudaGetDriverEntryPoint[_ptsz]
  cudaGetDriverEntryPointByVersion[_ptsz]
  cudaLibraryGetKernelCount
  cudaLibraryEnumerateKernels
  cudaGetExportTable
  __cudaGetKernel kernel_name=by_handle out=0
  __cudaInitModule returns=other
  __cudaPopCallConfiguration
  __cudaPushCallConfiguration returns=other grid=0:packed block=2:packed shared=4 stream=5
  __cudaRegisterFatBinary returns=other
  __cudaRegisterFatBinaryEnd returns=other
  __cudaRegisterFunction kernel_name=registered returns=other name=3
  __cudaRegisterHostVar returns=other
  __cudaRegisterManagedVar returns=other
  __cudaRegisterVar returns=other
  __cudaUnregisterFatBinary returns=other
  cudaCreateChannelDesc returns=other
  cudaGetDeviceProperties_v2
  cudaStreamGetCaptureInfo_v2 stream=0
  cudaStreamGetCaptureInfo_v3 stream=0
"""
_DRIVER_ERRORS = """
0 CUDA_SUCCESS
1 CUDA_ERROR_INVALID_VALUE
2 CUDA_ERROR_OUT_OF_MEMORY
3 CUDA_ERROR_NOT_INITIALIZED
4 CUDA_ERROR_DEINITIALIZED
5 CUDA_ERROR_PROFILER_DISABLED
6 CUDA_ERROR_PROFILER_NOT_INITIALIZED
7 CUDA_ERROR_PROFILER_ALREADY_STARTED
8 CUDA_ERROR_PROFILER_ALREADY_STOPPED
34 CUDA_ERROR_STUB_LIBRARY
36 CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER
46 CUDA_ERROR_DEVICE_UNAVAILABLE
100 CUDA_ERROR_NO_DEVICE
101 CUDA_ERROR_INVALID_DEVICE
102 CUDA_ERROR_DEVICE_NOT_LICENSED
200 CUDA_ERROR_INVALID_IMAGE
201 CUDA_ERROR_INVALID_CONTEXT
202 CUDA_ERROR_CONTEXT_ALREADY_CURRENT
205 CUDA_ERROR_MAP_FAILED
206 CUDA_ERROR_UNMAP_FAILED
207 CUDA_ERROR_ARRAY_IS_MAPPED
208 CUDA_ERROR_ALREADY_MAPPED
209 CUDA_ERROR_NO_BINARY_FOR_GPU
210 CUDA_ERROR_ALREADY_ACQUIRED
211 CUDA_ERROR_NOT_MAPPED
212 CUDA_ERROR_NOT_MAPPED_AS_ARRAY
213 CUDA_ERROR_NOT_MAPPED_AS_POINTER
214 CUDA_ERROR_ECC_UNCORRECTABLE
215 CUDA_ERROR_UNSUPPORTED_LIMIT
216 CUDA_ERROR_CONTEXT_ALREADY_IN_USE
217 CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
218 CUDA_ERROR_INVALID_PTX
219 CUDA_ERROR_INVALID_GRAPHICS_CONTEXT
220 CUDA_ERROR_NVLINK_UNCORRECTABLE
221 CUDA_ERROR_JIT_COMPILER_NOT_FOUND
222 CUDA_ERROR_UNSUPPORTED_PTX_VERSION
223 CUDA_ERROR_JIT_COMPILATION_DISABLED
224 CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY
225 CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC
226 CUDA_ERROR_CONTAINED
300 CUDA_ERROR_INVALID_SOURCE
301 CUDA_ERROR_FILE_NOT_FOUND
302 CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND
303 CUDA_ERROR_SHARED_OBJECT_INIT_FAILED
304 CUDA_ERROR_OPERATING_SYSTEM
400 CUDA_ERROR_INVALID_HANDLE
401 CUDA_ERROR_ILLEGAL_STATE
402 CUDA_ERROR_LOSSY_QUERY
500 CUDA_ERROR_NOT_FOUND
600 CUDA_ERROR_NOT_READY
700 CUDA_ERROR_ILLEGAL_ADDRESS
701 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
702 CUDA_ERROR_LAUNCH_TIMEOUT
703 CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING
704 CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
705 CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
708 CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE
709 CUDA_ERROR_CONTEXT_IS_DESTROYED
710 CUDA_ERROR_ASSERT
711 CUDA_ERROR_TOO_MANY_PEERS
712 CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
713 CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
714 CUDA_ERROR_HARDWARE_STACK_ERROR
715 CUDA_ERROR_ILLEGAL_INSTRUCTION
716 CUDA_ERROR_MISALIGNED_ADDRESS
717 CUDA_ERROR_INVALID_ADDRESS_SPACE
718 CUDA_ERROR_INVALID_PC
719 CUDA_ERROR_LAUNCH_FAILED
720 CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
721 CUDA_ERROR_TENSOR_MEMORY_LEAK
800 CUDA_ERROR_NOT_PERMITTED
801 CUDA_ERROR_NOT_SUPPORTED
802 CUDA_ERROR_SYSTEM_NOT_READY
803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
804 CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
805 CUDA_ERROR_MPS_CONNECTION_FAILED
806 CUDA_ERROR_MPS_RPC_FAILURE
807 CUDA_ERROR_MPS_SERVER_NOT_READY
808 CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
809 CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED
810 CUDA_ERROR_MPS_CLIENT_TERMINATED
811 CUDA_ERROR_CDP_NOT_SUPPORTED
812 CUDA_ERROR_CDP_VERSION_MISMATCH
900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
901 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
902 CUDA_ERROR_STREAM_CAPTURE_MERGE
903 CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
904 CUDA_ERROR_STREAM_CAPTURE_UNJOINED
905 CUDA_ERROR_STREAM_CAPTURE_ISOLATION
906 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
907 CUDA_ERROR_CAPTURED_EVENT
908 CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
909 CUDA_ERROR_TIMEOUT
910 CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
911 CUDA_ERROR_EXTERNAL_DEVICE
912 CUDA_ERROR_INVALID_CLUSTER_SIZE
913 CUDA_ERROR_FUNCTION_NOT_LOADED
914 CUDA_ERROR_INVALID_RESOURCE_TYPE
915 CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION
916 CUDA_ERROR_KEY_ROTATION
999 CUDA_ERROR_UNKNOWN
"""
_RUNTIME_ERRORS = """
0 cudaSuccess
1 cudaErrorInvalidValue
2 cudaErrorMemoryAllocation
3 cudaErrorInitializationError
4 cudaErrorCudartUnloading
5 cudaErrorProfilerDisabled
6 cudaErrorProfilerNotInitialized
7 cudaErrorProfilerAlreadyStarted
8 cudaErrorProfilerAlreadyStopped
9 cudaErrorInvalidConfiguration
12 cudaErrorInvalidPitchValue
13 cudaErrorInvalidSymbol
16 cudaErrorInvalidHostPointer
17 cudaErrorInvalidDevicePointer
18 cudaErrorInvalidTexture
19 cudaErrorInvalidTextureBinding
20 cudaErrorInvalidChannelDescriptor
21 cudaErrorInvalidMemcpyDirection
22 cudaErrorAddressOfConstant
23 cudaErrorTextureFetchFailed
24 cudaErrorTextureNotBound
25 cudaErrorSynchronizationError
26 cudaErrorInvalidFilterSetting
27 cudaErrorInvalidNormSetting
28 cudaErrorMixedDeviceExecution
31 cudaErrorNotYetImplemented
32 cudaErrorMemoryValueTooLarge
34 cudaErrorStubLibrary
35 cudaErrorInsufficientDriver
36 cudaErrorCallRequiresNewerDriver
37 cudaErrorInvalidSurface
43 cudaErrorDuplicateVariableName
44 cudaErrorDuplicateTextureName
45 cudaErrorDuplicateSurfaceName
46 cudaErrorDevicesUnavailable
49 cudaErrorIncompatibleDriverContext
52 cudaErrorMissingConfiguration
53 cudaErrorPriorLaunchFailure
65 cudaErrorLaunchMaxDepthExceeded
66 cudaErrorLaunchFileScopedTex
67 cudaErrorLaunchFileScopedSurf
68 cudaErrorSyncDepthExceeded
69 cudaErrorLaunchPendingCountExceeded
98 cudaErrorInvalidDeviceFunction
100 cudaErrorNoDevice
101 cudaErrorInvalidDevice
102 cudaErrorDeviceNotLicensed
103 cudaErrorSoftwareValidityNotEstablished
127 cudaErrorStartupFailure
200 cudaErrorInvalidKernelImage
201 cudaErrorDeviceUninitialized
205 cudaErrorMapBufferObjectFailed
206 cudaErrorUnmapBufferObjectFailed
207 cudaErrorArrayIsMapped
208 cudaErrorAlreadyMapped
209 cudaErrorNoKernelImageForDevice
210 cudaErrorAlreadyAcquired
211 cudaErrorNotMapped
212 cudaErrorNotMappedAsArray
213 cudaErrorNotMappedAsPointer
214 cudaErrorECCUncorrectable
215 cudaErrorUnsupportedLimit
216 cudaErrorDeviceAlreadyInUse
217 cudaErrorPeerAccessUnsupported
218 cudaErrorInvalidPtx
219 cudaErrorInvalidGraphicsContext
220 cudaErrorNvlinkUncorrectable
221 cudaErrorJitCompilerNotFound
222 cudaErrorUnsupportedPtxVersion
223 cudaErrorJitCompilationDisabled
224 cudaErrorUnsupportedExecAffinity
225 cudaErrorUnsupportedDevSideSync
226 cudaErrorContained
300 cudaErrorInvalidSource
301 cudaErrorFileNotFound
302 cudaErrorSharedObjectSymbolNotFound
303 cudaErrorSharedObjectInitFailed
304 cudaErrorOperatingSystem
400 cudaErrorInvalidResourceHandle
401 cudaErrorIllegalState
402 cudaErrorLossyQuery
500 cudaErrorSymbolNotFound
600 cudaErrorNotReady
700 cudaErrorIllegalAddress
701 cudaErrorLaunchOutOfResources
702 cudaErrorLaunchTimeout
703 cudaErrorLaunchIncompatibleTexturing
704 cudaErrorPeerAccessAlreadyEnabled
705 cudaErrorPeerAccessNotEnabled
708 cudaErrorSetOnActiveProcess
709 cudaErrorContextIsDestroyed
710 cudaErrorAssert
711 cudaErrorTooManyPeers
712 cudaErrorHostMemoryAlreadyRegistered
713 cudaErrorHostMemoryNotRegistered
714 cudaErrorHardwareStackError
715 cudaErrorIllegalInstruction
716 cudaErrorMisalignedAddress
717 cudaErrorInvalidAddressSpace
718 cudaErrorInvalidPc
719 cudaErrorLaunchFailure
720 cudaErrorCooperativeLaunchTooLarge
721 cudaErrorTensorMemoryLeak
800 cudaErrorNotPermitted
801 cudaErrorNotSupported
802 cudaErrorSystemNotReady
803 cudaErrorSystemDriverMismatch
804 cudaErrorCompatNotSupportedOnDevice
805 cudaErrorMpsConnectionFailed
806 cudaErrorMpsRpcFailure
807 cudaErrorMpsServerNotReady
808 cudaErrorMpsMaxClientsReached
809 cudaErrorMpsMaxConnectionsReached
810 cudaErrorMpsClientTerminated
811 cudaErrorCdpNotSupported
812 cudaErrorCdpVersionMismatch
900 cudaErrorStreamCaptureUnsupported
901 cudaErrorStreamCaptureInvalidated
902 cudaErrorStreamCaptureMerge
903 cudaErrorStreamCaptureUnmatched
904 cudaErrorStreamCaptureUnjoined
905 cudaErrorStreamCaptureIsolation
906 cudaErrorStreamCaptureImplicit
907 cudaErrorCapturedEvent
908 cudaErrorStreamCaptureWrongThread
909 cudaErrorTimeout
910 cudaErrorGraphExecUpdateFailure
911 cudaErrorExternalDevice
912 cudaErrorInvalidClusterSize
913 cudaErrorFunctionNotLoaded
914 cudaErrorInvalidResourceType
915 cudaErrorInvalidResourceConfiguration
999 cudaErrorUnknown
10000 cudaErrorApiFailureBase
"""
API = Api(
    name="CUDA",
    libraries=("libcuda.so", "libcudart.so"),
    functions=tuple(
        replace(function, name=_VERSION.sub("", function.name))
        for function in parse_functions(_PER_THREAD_STREAM.sub(r"\1\3\n\1\2\3", _FUNCTIONS))
    ),
    errors={"cu": parse_names(_DRIVER_ERRORS), "cuda": parse_names(_RUNTIME_ERRORS)},
)
