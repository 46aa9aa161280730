# The CUDA Toolkit's headers, which FreeKV needs on the host too: libcu++ (mdspan, span) and the 16-bit types. No
# nvcc, no GPU. Found in CUDAToolkit_ROOT (variable or environment), CUDA_HOME, CUDA_PATH, /usr/local/cuda, or a
# Python environment with the nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl wheels.
#
# Defines the imported target freekv::cuda_headers.
#
# What was found stays, unless it is gone or CUDAToolkit_ROOT names another toolkit than it did.
if((FREEKV_CUDA_INCLUDE AND NOT EXISTS "${FREEKV_CUDA_INCLUDE}/cuda_runtime_api.h") OR
   (CUDAToolkit_ROOT AND DEFINED FREEKV_CUDA_FOUND_FOR AND NOT FREEKV_CUDA_FOUND_FOR STREQUAL CUDAToolkit_ROOT))
  unset(FREEKV_CUDA_INCLUDE CACHE)
  unset(FREEKV_CCCL_INCLUDE CACHE)
  unset(FREEKV_NVCC CACHE)
endif()
set(FREEKV_CUDA_FOUND_FOR "${CUDAToolkit_ROOT}" CACHE INTERNAL "CUDAToolkit_ROOT when the headers were looked for")
set(_freekv_roots ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda)
file(GLOB _freekv_wheels "$ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/cu13")
list(APPEND _freekv_roots ${_freekv_wheels})
foreach(_freekv_root IN LISTS _freekv_roots)  # the first of version 13 or newer
  find_path(FREEKV_CUDA_INCLUDE cuda_bf16.h PATHS ${_freekv_root} PATH_SUFFIXES include targets/x86_64-linux/include
            NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH)
  if(FREEKV_CUDA_INCLUDE)
    file(STRINGS ${FREEKV_CUDA_INCLUDE}/cuda_runtime_api.h _freekv_version REGEX "^#define CUDART_VERSION ")
    if(_freekv_version MATCHES "([0-9]+)$" AND CMAKE_MATCH_1 GREATER_EQUAL 13000)
      break()
    endif()
    unset(FREEKV_CUDA_INCLUDE CACHE)
  endif()
endforeach()
find_path(FREEKV_CCCL_INCLUDE cuda/std/mdspan HINTS ${FREEKV_CUDA_INCLUDE}/cccl ${FREEKV_CUDA_INCLUDE} ${_freekv_roots}
          PATH_SUFFIXES cccl include include/cccl NO_CMAKE_FIND_ROOT_PATH)
mark_as_advanced(FREEKV_CUDA_INCLUDE FREEKV_CCCL_INCLUDE)
set(FreekvCudaHeaders_REASON "FreeKV needs the headers of CUDA 13: set CUDAToolkit_ROOT to a toolkit, or install the wheels nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl into a virtual environment and set VIRTUAL_ENV.")
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(FreekvCudaHeaders REQUIRED_VARS FREEKV_CUDA_INCLUDE FREEKV_CCCL_INCLUDE
                                  REASON_FAILURE_MESSAGE "${FreekvCudaHeaders_REASON}" NAME_MISMATCHED)
if(FreekvCudaHeaders_FOUND AND NOT TARGET freekv::cuda_headers)
  add_library(freekv::cuda_headers INTERFACE IMPORTED)
  set_target_properties(freekv::cuda_headers PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${FREEKV_CUDA_INCLUDE};${FREEKV_CCCL_INCLUDE}")
endif()
