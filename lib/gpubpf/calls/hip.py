"""The functions of HIP that libamdhip64 exports: .so.5 (ROCm 5), .so.6 and .so.7.

Sources: the headers of HIP 5.2 and 6.3 (hip_runtime_api.h, hip_ext.h, hiprtc.h); for later functions the
documentation of HIP 7 and of hip-python 10. No single library exports all of them.

The layouts follow from the prototypes by the System V ABI. For every function of Debian's library the layout
was compared with live calls (docs/host-calls.md). A function without a header here has only the fields that the
corresponding CUDA function has, or that its documentation states clearly.
"""

from __future__ import annotations

from gpubpf.calls.api import Api, parse_functions, parse_names

_FUNCTIONS = """
launch:
  hipLaunchCooperativeKernel_spt kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
  hipLaunchKernel_spt kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
  hipModuleLaunchKernel kernel=0 grid=1 block=4 shared=s1 stream=s2
  hipLaunchCooperativeKernel kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
  hipLaunchCooperativeKernelMultiDevice
  hipExtLaunchMultiKernelMultiDevice
  hipLaunchByPtr kernel=0
  hipLaunchKernel kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
  hipExtLaunchKernel kernel=0 grid=1:packed block=3:packed shared=s0 stream=s1
  hipGraphLaunch stream=1
  hipModuleLaunchCooperativeKernel kernel=0 grid=1 block=4 shared=s1 stream=s2
  hipModuleLaunchCooperativeKernelMultiDevice
  hipExtModuleLaunchKernel kernel=0 grid=1:items block=4 shared=s1 stream=s2 \
symbol=_Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j
  hipHccModuleLaunchKernel kernel=0 grid=1:items block=4 shared=s1 stream=s2 \
symbol=_Z24hipHccModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_
  hipLaunchKernelGGLImpl returns=other kernel=0 grid=1@0 block=2@0 shared=3 stream=4 \
symbol=_ZN8hip_impl22hipLaunchKernelGGLImplEmRK4dim3S2_jP12ihipStream_tPPv
  hipLaunchKernelExC kernel=1 grid=0@0 block=0@12 shared=0@24 stream=0@32
  hipDrvLaunchKernelEx kernel=1 grid=0@0 block=0@12 shared=0@24 stream=0@32
  hipGraphLaunch_spt stream=1

memory:
  hipMalloc bytes=1 out=0
  hipExtMallocWithFlags bytes=1 out=0
  hipHostMalloc bytes=1 out=0
  hipMallocManaged bytes=1 out=0
  hipMemAdvise bytes=1
  hipStreamAttachMemAsync stream=0 bytes=2
  hipMallocAsync stream=2 bytes=1 out=0
  hipFreeAsync stream=1
  hipMemPoolTrimTo bytes=1
  hipMemPoolSetAttribute
  hipMemPoolSetAccess
  hipMemPoolCreate out=0
  hipMemPoolDestroy
  hipMallocFromPoolAsync stream=3 bytes=1 out=0
  hipMemPoolExportToShareableHandle
  hipMemPoolImportFromShareableHandle out=0
  hipMemPoolExportPointer
  hipMemPoolImportPointer out=0
  hipHostRegister bytes=1
  hipHostUnregister
  hipMallocPitch bytes=2 count=3 out=0
  hipMemAllocPitch bytes=2 count=3 out=0
  hipFree
  hipHostFree
  hipMemGetInfo
  hipMallocArray out=0
  hipArrayCreate out=0
  hipArrayDestroy
  hipArray3DCreate out=0
  hipMalloc3D out=0
  hipFreeArray
  hipFreeMipmappedArray
  hipMalloc3DArray out=0
  hipMallocMipmappedArray out=0
  hipMipmappedArrayCreate out=0
  hipMipmappedArrayDestroy
  hipMemAddressFree bytes=1
  hipMemAddressReserve bytes=1 out=0
  hipMemCreate bytes=1 out=0
  hipMemExportToShareableHandle
  hipMemImportFromShareableHandle out=0
  hipMemMap bytes=1
  hipMemMapArrayAsync stream=2
  hipMemRelease
  hipMemRetainAllocationHandle out=0
  hipMemSetAccess bytes=1
  hipMemUnmap bytes=1
  hipPointerSetAttribute
  hipExtHostAlloc bytes=1 out=0
  hipHostAlloc bytes=1 out=0
  hipFreeHost
  hipMallocHost bytes=1 out=0
  hipMemAllocHost bytes=1 out=0
  hipMemAdvise_v2 bytes=1
  hipMemSetMemPool

copy:
  hipMemcpy_spt bytes=2 copy=3
  hipMemcpyToSymbol_spt bytes=2 copy=4
  hipMemcpyFromSymbol_spt bytes=2 copy=4
  hipMemcpy2D_spt bytes=4 count=5 copy=s0
  hipMemcpy2DToArray_spt bytes=5 count=s0 copy=s1
  hipMemcpy2DFromArray_spt bytes=5 count=s0 copy=s1
  hipMemcpy3D_spt copy=0@152
  hipMemset_spt bytes=2
  hipMemset2D_spt bytes=3 count=4
  hipMemset3D_spt
  hipMemcpyAsync_spt stream=4 bytes=2 copy=3
  hipMemPrefetchAsync stream=3 bytes=1
  hipMemcpy bytes=2 copy=3
  hipMemcpyWithStream stream=4 bytes=2 copy=3
  hipMemcpyHtoD bytes=2
  hipMemcpyDtoH bytes=2
  hipMemcpyDtoD bytes=2
  hipMemcpyHtoDAsync stream=3 bytes=2
  hipMemcpyDtoHAsync stream=3 bytes=2
  hipMemcpyDtoDAsync stream=3 bytes=2
  hipMemcpyToSymbol bytes=2 copy=4
  hipMemcpyToSymbolAsync stream=5 bytes=2 copy=4
  hipMemcpyFromSymbol bytes=2 copy=4
  hipMemcpyFromSymbolAsync stream=5 bytes=2 copy=4
  hipMemcpyAsync stream=4 bytes=2 copy=3
  hipMemset bytes=2
  hipMemsetD8 bytes=2
  hipMemsetD8Async stream=3 bytes=2
  hipMemsetD16 bytes=2 count=#2
  hipMemsetD16Async stream=3 bytes=2 count=#2
  hipMemsetD32 bytes=2 count=#4
  hipMemsetAsync stream=3 bytes=2
  hipMemsetD32Async stream=3 bytes=2 count=#4
  hipMemset2D bytes=3 count=4
  hipMemset2DAsync stream=5 bytes=3 count=4
  hipMemset3D
  hipMemset3DAsync stream=1
  hipMemcpy2D bytes=4 count=5 copy=s0
  hipMemcpyParam2D bytes=0@112 count=0@120
  hipMemcpyParam2DAsync stream=1 bytes=0@112 count=0@120
  hipMemcpy2DAsync stream=s1 bytes=4 count=5 copy=s0
  hipMemcpy2DToArray bytes=5 count=s0 copy=s1
  hipMemcpy2DToArrayAsync stream=s2 bytes=5 count=s0 copy=s1
  hipMemcpy2DFromArray bytes=5 count=s0 copy=s1
  hipMemcpy2DFromArrayAsync stream=s2 bytes=5 count=s0 copy=s1
  hipMemcpyAtoH bytes=3
  hipMemcpyHtoA bytes=3
  hipMemcpy3D copy=0@152
  hipMemcpy3DAsync stream=1 copy=0@152
  hipDrvMemcpy3D
  hipDrvMemcpy3DAsync stream=1
  hipMemcpyPeer bytes=4
  hipMemcpyPeerAsync stream=5 bytes=4
  hipDrvMemcpy2DUnaligned bytes=0@112 count=0@120
  hipMemcpyAtoD bytes=3
  hipMemcpyDtoA bytes=3
  hipMemcpyAtoA bytes=4
  hipMemcpyAtoHAsync stream=4 bytes=3
  hipMemcpyHtoAAsync stream=4 bytes=3
  hipMemcpy2DArrayToArray bytes=s0 count=s1 copy=s2
  hipMemcpyFromArray bytes=4 copy=5
  hipMemcpyToArray bytes=4 copy=5
  hipMemsetAsync_spt stream=3 bytes=2
  hipMemset2DAsync_spt stream=5 bytes=3 count=4
  hipMemset3DAsync_spt stream=1
  hipMemcpy2DAsync_spt stream=s1 bytes=4 count=5 copy=s0
  hipMemcpy3DAsync_spt stream=1 copy=0@152
  hipMemcpyFromSymbolAsync_spt stream=5 bytes=2 copy=4
  hipMemcpyToSymbolAsync_spt stream=5 bytes=2 copy=4
  hipMemcpyFromArray_spt bytes=4 copy=5
  hipMemcpy2DFromArrayAsync_spt stream=s2 bytes=5 count=s0 copy=s1
  hipMemcpy2DToArrayAsync_spt stream=s2 bytes=5 count=s0 copy=s1
  hipDrvMemDiscardAndPrefetchBatchAsync
  hipDrvMemDiscardBatchAsync
  hipMemDiscardAndPrefetchBatchAsync
  hipMemDiscardBatchAsync
  hipMemPrefetchAsync_v2 stream=4 bytes=1
  hipMemPrefetchBatchAsync
  hipMemcpy3DBatchAsync
  hipMemcpyBatchAsync
  hipMemcpy3DPeer
  hipMemcpy3DPeerAsync stream=1
  hipMemsetD2D8 bytes=3 count=4
  hipMemsetD2D8Async stream=5 bytes=3 count=4
  hipMemsetD2D16
  hipMemsetD2D16Async stream=5
  hipMemsetD2D32
  hipMemsetD2D32Async stream=5

sync:
  hipStreamSynchronize_spt stream=0
  hipStreamWaitEvent_spt stream=0
  hipDeviceSynchronize
  hipStreamSynchronize stream=0
  hipStreamWaitEvent stream=0
  hipEventSynchronize
  hipCtxSynchronize
  hipExecutionCtxSynchronize
  hipExecutionCtxWaitEvent

stream:
  hipStreamQuery_spt returns=query stream=0
  hipStreamCreate out=0
  hipStreamCreateWithFlags out=0
  hipStreamCreateWithPriority out=0
  hipStreamDestroy stream=0
  hipStreamQuery returns=query stream=0
  hipExtStreamCreateWithCUMask out=0
  hipStreamAddCallback stream=0
  hipStreamWaitValue32 stream=0
  hipStreamWaitValue64 stream=0
  hipStreamWriteValue32 stream=0
  hipStreamWriteValue64 stream=0
  hipLaunchHostFunc stream=0
  hipStreamBatchMemOp stream=0
  hipStreamAddCallback_spt stream=0
  hipLaunchHostFunc_spt stream=0
  hipExecutionCtxStreamCreate out=0

event:
  hipEventCreateWithFlags out=0
  hipEventCreate out=0
  hipEventRecord stream=1
  hipEventDestroy
  hipEventElapsedTime returns=query
  hipEventQuery returns=query
  hipEventRecord_spt stream=1
  hipEventRecordWithFlags stream=1

graph:
  hipStreamBeginCapture stream=0
  hipStreamEndCapture stream=0 out=1
  hipStreamUpdateCaptureDependencies stream=0
  hipGraphCreate out=0
  hipGraphDestroy
  hipGraphAddDependencies
  hipGraphRemoveDependencies
  hipGraphDestroyNode
  hipGraphClone out=0
  hipGraphNodeFindInClone out=0
  hipGraphInstantiate out=0
  hipGraphInstantiateWithFlags out=0
  hipGraphExecDestroy
  hipGraphExecUpdate
  hipGraphAddKernelNode out=0
  hipGraphKernelNodeSetParams
  hipGraphExecKernelNodeSetParams
  hipGraphAddMemcpyNode out=0
  hipGraphMemcpyNodeSetParams
  hipGraphKernelNodeSetAttribute
  hipGraphExecMemcpyNodeSetParams
  hipGraphAddMemcpyNode1D out=0 bytes=s0 copy=s1
  hipGraphMemcpyNodeSetParams1D bytes=3 copy=4
  hipGraphExecMemcpyNodeSetParams1D bytes=4 copy=5
  hipGraphAddMemcpyNodeFromSymbol bytes=s0 copy=s2 out=0
  hipGraphMemcpyNodeSetParamsFromSymbol bytes=3 copy=5
  hipGraphExecMemcpyNodeSetParamsFromSymbol bytes=4 copy=s0
  hipGraphAddMemcpyNodeToSymbol bytes=s0 copy=s2 out=0
  hipGraphMemcpyNodeSetParamsToSymbol bytes=3 copy=5
  hipGraphExecMemcpyNodeSetParamsToSymbol bytes=4 copy=s0
  hipGraphAddMemsetNode out=0
  hipGraphMemsetNodeSetParams
  hipGraphExecMemsetNodeSetParams
  hipGraphAddHostNode out=0
  hipGraphHostNodeSetParams
  hipGraphExecHostNodeSetParams
  hipGraphAddChildGraphNode out=0
  hipGraphExecChildGraphNodeSetParams
  hipGraphAddEmptyNode out=0
  hipGraphAddEventRecordNode out=0
  hipGraphEventRecordNodeSetEvent
  hipGraphExecEventRecordNodeSetEvent
  hipGraphAddEventWaitNode out=0
  hipGraphEventWaitNodeSetEvent
  hipGraphExecEventWaitNodeSetEvent
  hipGraphAddBatchMemOpNode out=0
  hipGraphBatchMemOpNodeSetParams
  hipGraphExecBatchMemOpNodeSetParams
  hipStreamBeginCaptureToGraph stream=0
  hipGraphInstantiateWithParams out=0
  hipGraphUpload stream=1
  hipGraphAddNode out=0
  hipGraphNodeSetParams
  hipGraphExecNodeSetParams
  hipDrvGraphAddMemcpyNode out=0
  hipGraphAddMemAllocNode out=0
  hipGraphAddMemFreeNode out=0
  hipUserObjectCreate out=0
  hipUserObjectRelease
  hipUserObjectRetain
  hipGraphRetainUserObject
  hipGraphReleaseUserObject
  hipGraphDebugDotPrint name=1
  hipGraphKernelNodeCopyAttributes
  hipGraphNodeSetEnabled
  hipGraphAddExternalSemaphoresWaitNode out=0
  hipGraphAddExternalSemaphoresSignalNode out=0
  hipGraphExternalSemaphoresSignalNodeSetParams
  hipGraphExternalSemaphoresWaitNodeSetParams
  hipGraphExecExternalSemaphoresSignalNodeSetParams
  hipGraphExecExternalSemaphoresWaitNodeSetParams
  hipDrvGraphMemcpyNodeSetParams
  hipDrvGraphAddMemsetNode out=0
  hipDrvGraphAddMemFreeNode out=0
  hipDrvGraphExecMemcpyNodeSetParams
  hipDrvGraphExecMemsetNodeSetParams
  hipStreamBeginCapture_spt stream=0
  hipStreamEndCapture_spt stream=0 out=1

module:
  hipFuncSetAttribute
  hipFuncSetCacheConfig
  hipFuncSetSharedMemConfig
  hipModuleGetGlobal out=0 name=3
  hipGetSymbolAddress out=0
  hipModuleLoad out=0 name=1
  hipModuleUnload
  hipModuleGetFunction kernel_name=by_name out=0 name=2
  hipModuleGetTexRef out=0 name=2
  hipModuleLoadData out=0
  hipModuleLoadDataEx out=0
  hipModuleOccupancyMaxPotentialBlockSize
  hipModuleOccupancyMaxPotentialBlockSizeWithFlags
  hipModuleOccupancyMaxActiveBlocksPerMultiprocessor
  hipModuleOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
  hipOccupancyMaxActiveBlocksPerMultiprocessor
  hipOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
  hipOccupancyMaxPotentialBlockSize
  hipGetFuncBySymbol kernel_name=by_handle out=0
  hiprtcCreateProgram out=0 name=2
  hiprtcCompileProgram
  hiprtcDestroyProgram
  hiprtcAddNameExpression name=1
  hiprtcGetCode
  hiprtcGetProgramLog
  hiprtcGetBitcode
  hiprtcLinkCreate
  hiprtcLinkAddFile name=2
  hiprtcLinkAddData
  hiprtcLinkComplete out=1
  hiprtcLinkDestroy
  hipLinkCreate
  hipLinkAddFile name=2
  hipLinkAddData
  hipLinkComplete out=1
  hipLinkDestroy
  hipModuleLoadFatBinary out=0
  hipLibraryLoadData out=0
  hipLibraryLoadFromFile out=0 name=1
  hipLibraryUnload
  hipLibraryGetKernel kernel_name=by_name out=0 name=2
  hipLibraryGetKernelCount
  hipLibraryEnumerateKernels
  hipKernelGetLibrary
  hipKernelGetName
  hipKernelGetParamInfo
  hipKernelGetFunction kernel_name=by_handle out=0
  hipKernelGetAttribute
  hipKernelSetAttribute
  hipModuleGetFunctionCount
  hipOccupancyAvailableDynamicSMemPerBlock
  hipLibraryGetGlobal
  hipLibraryGetManaged
  hipOccupancyMaxActiveClusters
  hipOccupancyMaxPotentialClusterSize

device:
  hipInit
  hipDeviceReset
  hipDeviceSetMemPool
  hipGetDeviceProperties
  hipDeviceSetCacheConfig
  hipDeviceSetSharedMemConfig
  hipSetDeviceFlags
  hipChooseDevice
  hipDeviceEnablePeerAccess
  hipDeviceDisablePeerAccess
  hipDevicePrimaryCtxRelease
  hipDevicePrimaryCtxRetain out=0
  hipDevicePrimaryCtxReset
  hipDevicePrimaryCtxSetFlags
  hipSetValidDevices
  hipGetDevicePropertiesR0600
  hipDeviceSetLimit
  hipChooseDeviceR0600
  hipDeviceSetGraphMemAttribute
  hipDeviceGraphMemTrim
  hipCtxCreate out=0
  hipCtxDestroy
  hipCtxEnablePeerAccess
  hipCtxDisablePeerAccess
  hipCtxSetCacheConfig
  hipCtxSetSharedMemConfig
  hipProfilerStart
  hipProfilerStop
  hipGetDevicePropertiesR0000
  hipChooseDeviceR0000
  hipExecutionCtxDestroy
  hipExecutionCtxRecordEvent
  hipGreenCtxCreate out=0

other:
  hipIpcGetMemHandle
  hipIpcOpenMemHandle out=0
  hipIpcCloseMemHandle
  hipIpcGetEventHandle
  hipIpcOpenEventHandle out=0
  hipImportExternalSemaphore out=0
  hipSignalExternalSemaphoresAsync stream=3
  hipWaitExternalSemaphoresAsync stream=3
  hipDestroyExternalSemaphore
  hipImportExternalMemory out=0
  hipExternalMemoryGetMappedBuffer out=0
  hipDestroyExternalMemory
  hipBindTextureToMipmappedArray
  hipCreateTextureObject out=0
  hipDestroyTextureObject
  hipTexRefSetAddressMode
  hipTexRefSetArray
  hipTexRefSetFilterMode
  hipTexRefSetFlags
  hipTexRefSetFormat
  hipTexObjectCreate out=0
  hipTexObjectDestroy
  hipTexRefSetMipmapFilterMode
  hipTexRefSetMipmapLevelBias
  hipTexRefSetMipmapLevelClamp
  hipTexRefSetMipmappedArray
  hipRegisterApiCallback
  hipRemoveApiCallback
  hipRegisterActivityCallback
  hipRemoveActivityCallback
  hipGLGetDevices
  hipGraphicsGLRegisterBuffer
  hipGraphicsGLRegisterImage
  hipGraphicsMapResources stream=2
  hipGraphicsSubResourceGetMappedArray out=0
  hipGraphicsResourceGetMappedPointer out=0
  hipGraphicsUnmapResources stream=2
  hipGraphicsUnregisterResource
  hipExternalMemoryGetMappedMipmappedArray out=0
  hipCreateSurfaceObject out=0
  hipDestroySurfaceObject
  hipBindTexture
  hipBindTexture2D
  hipBindTextureToArray
  hipTexRefSetAddress
  hipTexRefSetAddress2D
  hipTexRefSetBorderColor
  hipTexRefSetMaxAnisotropy
  hipUnbindTexture

trivial:
  __hipGetPCH returns=other
  hipStreamGetPriority_spt stream=0
  hipStreamGetFlags_spt stream=0
  hipDriverGetVersion
  hipRuntimeGetVersion
  hipDeviceGet
  hipDeviceComputeCapability
  hipDeviceGetName
  hipDeviceGetUuid
  hipDeviceGetP2PAttribute
  hipDeviceGetPCIBusId
  hipDeviceGetByPCIBusId
  hipDeviceTotalMem
  hipSetDevice
  hipGetDevice
  hipGetDeviceCount
  hipDeviceGetAttribute
  hipDeviceGetDefaultMemPool
  hipDeviceGetMemPool
  hipDeviceGetCacheConfig
  hipDeviceGetLimit
  hipDeviceGetSharedMemConfig
  hipGetDeviceFlags
  hipExtGetLinkTypeAndHopCount
  hipGetLastError
  hipPeekAtLastError
  hipGetErrorName returns=other
  hipGetErrorString returns=other
  hipDeviceGetStreamPriorityRange
  hipStreamGetFlags stream=0
  hipStreamGetPriority stream=0
  hipExtStreamGetCUMask stream=0
  hipPointerGetAttributes
  hipPointerGetAttribute
  hipDrvPointerGetAttributes
  hipMemRangeGetAttribute
  hipMemRangeGetAttributes
  hipMemPoolGetAttribute
  hipMemPoolGetAccess
  hipHostGetDevicePointer out=0
  hipHostGetFlags
  hipGetSymbolSize
  hipMemPtrGetInfo
  hipGetMipmappedArrayLevel
  hipDeviceCanAccessPeer
  hipMemGetAddressRange
  hipDevicePrimaryCtxGetState
  hipFuncGetAttributes
  hipFuncGetAttribute
  hipConfigureCall grid=0:packed block=2:packed shared=4 stream=5
  hipSetupArgument
  __hipPushCallConfiguration grid=0:packed block=2:packed shared=4 stream=5
  __hipPopCallConfiguration
  hipGetTextureReference
  hipGetChannelDesc
  hipGetTextureObjectResourceDesc
  hipGetTextureObjectResourceViewDesc
  hipGetTextureObjectTextureDesc
  hipTexObjectGetResourceDesc
  hipTexObjectGetResourceViewDesc
  hipTexObjectGetTextureDesc
  hipMipmappedArrayGetLevel
  hipApiName returns=other
  hipKernelNameRef returns=other
  hipKernelNameRefByPtr returns=other stream=1
  hipGetStreamDeviceId returns=other stream=0
  hipStreamGetCaptureInfo stream=0
  hipStreamGetCaptureInfo_v2 stream=0
  hipStreamIsCapturing stream=0
  hipThreadExchangeStreamCaptureMode
  hipGraphGetEdges
  hipGraphGetNodes
  hipGraphGetRootNodes
  hipGraphNodeGetDependencies
  hipGraphNodeGetDependentNodes
  hipGraphNodeGetType
  hipGraphKernelNodeGetParams
  hipGraphMemcpyNodeGetParams
  hipGraphKernelNodeGetAttribute
  hipGraphMemsetNodeGetParams
  hipGraphHostNodeGetParams
  hipGraphChildGraphNodeGetGraph
  hipGraphEventRecordNodeGetEvent
  hipGraphEventWaitNodeGetEvent
  hipMemGetAccess
  hipMemGetAllocationGranularity
  hipMemGetAllocationPropertiesFromHandle
  hipExtGetLastError
  hipDrvGetErrorName
  hipDrvGetErrorString
  hipStreamGetDevice stream=0
  hipGraphBatchMemOpNodeGetParams
  hipGetProcAddress
  hipArrayGetInfo
  hipArrayGetDescriptor
  hipArray3DGetDescriptor
  hipGraphExecGetFlags
  hipGraphMemAllocNodeGetParams
  hipGraphMemFreeNodeGetParams
  hipDeviceGetGraphMemAttribute
  hipGraphNodeGetEnabled
  hipGraphExternalSemaphoresSignalNodeGetParams
  hipGraphExternalSemaphoresWaitNodeGetParams
  hipDrvGraphMemcpyNodeGetParams
  hipCtxGetApiVersion
  hipCtxGetCacheConfig
  hipCtxGetCurrent
  hipCtxGetDevice
  hipCtxGetFlags
  hipCtxGetSharedMemConfig
  hipCtxPopCurrent
  hipCtxPushCurrent
  hipCtxSetCurrent
  hipGetCmdName returns=other
  hipGetTextureAlignmentOffset
  hipCreateChannelDesc returns=other
  hipTexRefGetAddress
  hipTexRefGetAddressMode
  hipTexRefGetFilterMode
  hipTexRefGetFlags
  hipTexRefGetFormat
  hipTexRefGetMaxAnisotropy
  hipTexRefGetMipmapFilterMode
  hipTexRefGetMipmapLevelBias
  hipTexRefGetMipmapLevelClamp
  __hipRegisterFatBinary returns=other
  __hipRegisterFunction kernel_name=registered returns=other name=3
  __hipRegisterManagedVar returns=other
  __hipRegisterSurface returns=other
  __hipRegisterTexture returns=other
  __hipRegisterVar returns=other
  __hipUnregisterFatBinary returns=other
  hiprtcGetErrorString returns=other
  hiprtcVersion
  hiprtcGetCodeSize
  hiprtcGetProgramLogSize
  hiprtcGetLoweredName
  hiprtcGetBitcodeSize
  hipStreamIsCapturing_spt stream=0
  hipStreamGetCaptureInfo_spt stream=0
  hipStreamGetCaptureInfo_v2_spt stream=0
  hipGetProcAddress_spt
  hipGetDriverEntryPoint
  hipGetDriverEntryPoint_spt
  hipDevResourceGenerateDesc
  hipDevSmResourceSplit
  hipDevSmResourceSplitByCount
  hipDeviceGetDevResource
  hipDeviceGetExecutionCtx
  hipDeviceGetTexture1DLinearMaxWidth
  hipExecutionCtxGetDevResource
  hipExecutionCtxGetDevice
  hipExecutionCtxGetId
  hipExtDisableLogging
  hipExtEnableLogging
  hipExtSetLoggingParams
  hipMemGetDefaultMemPool
  hipMemGetHandleForAddressRange
  hipMemGetMemPool
  hipMipmappedArrayGetMemoryRequirements
  hipStreamCopyAttributes
  hipStreamGetAttribute stream=0
  hipStreamGetDevResource stream=0
  hipStreamGetId stream=0
  hipStreamSetAttribute stream=0
  hipTexRefGetArray
  hipTexRefGetBorderColor
  hipTexRefGetMipMappedArray
"""
_ERRORS = """
0 hipSuccess
1 hipErrorInvalidValue
2 hipErrorOutOfMemory
3 hipErrorNotInitialized
4 hipErrorDeinitialized
5 hipErrorProfilerDisabled
6 hipErrorProfilerNotInitialized
7 hipErrorProfilerAlreadyStarted
8 hipErrorProfilerAlreadyStopped
9 hipErrorInvalidConfiguration
12 hipErrorInvalidPitchValue
13 hipErrorInvalidSymbol
17 hipErrorInvalidDevicePointer
21 hipErrorInvalidMemcpyDirection
35 hipErrorInsufficientDriver
52 hipErrorMissingConfiguration
53 hipErrorPriorLaunchFailure
98 hipErrorInvalidDeviceFunction
100 hipErrorNoDevice
101 hipErrorInvalidDevice
200 hipErrorInvalidImage
201 hipErrorInvalidContext
202 hipErrorContextAlreadyCurrent
205 hipErrorMapFailed
206 hipErrorUnmapFailed
207 hipErrorArrayIsMapped
208 hipErrorAlreadyMapped
209 hipErrorNoBinaryForGpu
210 hipErrorAlreadyAcquired
211 hipErrorNotMapped
212 hipErrorNotMappedAsArray
213 hipErrorNotMappedAsPointer
214 hipErrorECCNotCorrectable
215 hipErrorUnsupportedLimit
216 hipErrorContextAlreadyInUse
217 hipErrorPeerAccessUnsupported
218 hipErrorInvalidKernelFile
219 hipErrorInvalidGraphicsContext
300 hipErrorInvalidSource
301 hipErrorFileNotFound
302 hipErrorSharedObjectSymbolNotFound
303 hipErrorSharedObjectInitFailed
304 hipErrorOperatingSystem
400 hipErrorInvalidHandle
401 hipErrorIllegalState
500 hipErrorNotFound
600 hipErrorNotReady
700 hipErrorIllegalAddress
701 hipErrorLaunchOutOfResources
702 hipErrorLaunchTimeOut
704 hipErrorPeerAccessAlreadyEnabled
705 hipErrorPeerAccessNotEnabled
708 hipErrorSetOnActiveProcess
709 hipErrorContextIsDestroyed
710 hipErrorAssert
712 hipErrorHostMemoryAlreadyRegistered
713 hipErrorHostMemoryNotRegistered
719 hipErrorLaunchFailure
720 hipErrorCooperativeLaunchTooLarge
801 hipErrorNotSupported
900 hipErrorStreamCaptureUnsupported
901 hipErrorStreamCaptureInvalidated
902 hipErrorStreamCaptureMerge
903 hipErrorStreamCaptureUnmatched
904 hipErrorStreamCaptureUnjoined
905 hipErrorStreamCaptureIsolation
906 hipErrorStreamCaptureImplicit
907 hipErrorCapturedEvent
908 hipErrorStreamCaptureWrongThread
910 hipErrorGraphExecUpdateFailure
911 hipErrorInvalidChannelDescriptor
912 hipErrorInvalidTexture
914 hipErrorInvalidResourceType
915 hipErrorInvalidResourceConfiguration
916 hipErrorStreamDetached
999 hipErrorUnknown
1052 hipErrorRuntimeMemory
1053 hipErrorRuntimeOther
1054 hipErrorInvalidClusterSize
"""
_HIPRTC_ERRORS = """
0 HIPRTC_SUCCESS
1 HIPRTC_ERROR_OUT_OF_MEMORY
2 HIPRTC_ERROR_PROGRAM_CREATION_FAILURE
3 HIPRTC_ERROR_INVALID_INPUT
4 HIPRTC_ERROR_INVALID_PROGRAM
5 HIPRTC_ERROR_INVALID_OPTION
6 HIPRTC_ERROR_COMPILATION
7 HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE
8 HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION
9 HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION
10 HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID
11 HIPRTC_ERROR_INTERNAL_ERROR
"""
API = Api(
    name="HIP",
    libraries=("libamdhip64.so", "libhiprtc.so"),
    functions=parse_functions(_FUNCTIONS),
    errors={"hip": parse_names(_ERRORS), "hiprtc": parse_names(_HIPRTC_ERRORS)},
)
