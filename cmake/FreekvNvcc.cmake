# nvcc of CUDA 13 and its runtime library: freekv_compile_cuda, freekv_toolkit (folder), freekv_cudart (library).
#
# nvcc is called as a program rather than as CMake's CUDA language, so that the compiler of the Python wheels
# (nvidia-cuda-nvcc, -crt, -cccl and -runtime), which CMake 3.25 does not recognise, will do.
file(GLOB wheels $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/cu13)
set(toolkits ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH} ${wheels})
list(TRANSFORM toolkits APPEND /bin)
find_program(FREEKV_NVCC nvcc DOC "nvcc of CUDA 13.0 or newer" HINTS ${toolkits} PATHS /usr/local/cuda/bin)
if(FREEKV_NVCC)
  execute_process(COMMAND ${FREEKV_NVCC} --version OUTPUT_VARIABLE version ERROR_QUIET)
  if(version MATCHES "release ([0-9]+)" AND CMAKE_MATCH_1 LESS 13)
    message(STATUS "${FREEKV_NVCC} is of CUDA ${CMAKE_MATCH_1}")
    unset(FREEKV_NVCC CACHE)
  endif()
endif()
if(NOT FREEKV_NVCC)
  message(FATAL_ERROR "FREEKV_CUDA and FREEKV_C_CUDA need nvcc of CUDA 13: set CUDAToolkit_ROOT to a toolkit, or install the wheels "
                      "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime into a virtual "
                      "environment and set VIRTUAL_ENV, or configure with -DFREEKV_CUDA=OFF -DFREEKV_C_CUDA=OFF.")
endif()
# The program found may be a wrapper: nvcc itself says where its toolkit is.
execute_process(COMMAND ${FREEKV_NVCC} --dryrun -c ${PROJECT_SOURCE_DIR}/examples/support/device/device_policies.cu ERROR_VARIABLE steps)
if(NOT steps MATCHES "TOP=([^\n]+)")
  message(FATAL_ERROR "${FREEKV_NVCC} does not work:\n${steps}")
endif()
file(REAL_PATH ${CMAKE_MATCH_1} freekv_toolkit)
file(GLOB freekv_cudart ${freekv_toolkit}/lib64/libcudart.so ${freekv_toolkit}/lib/libcudart.so ${freekv_toolkit}/lib/libcudart.so.13
                 ${freekv_toolkit}/targets/*/lib/libcudart.so)
if(NOT freekv_cudart)
  message(FATAL_ERROR "The toolkit in ${freekv_toolkit} has no libcudart.so; of the wheels it is nvidia-cuda-runtime.")
endif()
list(GET freekv_cudart 0 freekv_cudart)

# PTX for the architectures that ARGN names, nothing assembled: a device's driver does that, and the interpreter reads it as it is.
# A driver that is older than the toolkit cannot: FREEKV_CUDA_MACHINE_CODE names the devices to assemble for instead.
set(FREEKV_CUDA_MACHINE_CODE "" CACHE STRING "Compute capabilities, as 90 or 80\\;90, whose machine code programs hold in place of PTX")
set(freekv_machine_code)
foreach(capability ${FREEKV_CUDA_MACHINE_CODE})
  list(APPEND freekv_machine_code -gencode=arch=compute_${capability},code=sm_${capability})
endforeach()
set(freekv_nvcc_compile ${FREEKV_NVCC} -std=c++20 -ccbin ${CMAKE_CXX_COMPILER} -I${PROJECT_SOURCE_DIR}/include
                        -Werror all-warnings -Xcompiler=-Wall,-Wextra,-ffp-contract=off)
foreach(option ${freekv_gcc_memory})
  list(APPEND freekv_nvcc_compile -Xcompiler=${option})
endforeach()
# Host code fuses nothing, as device code fuses what says so alone: the two are compared bit by bit.
# `OBJECT other` names an object that is not called like its source.
# What tests and the pipelines of programs are compiled for: paths differ between these two. tests/run.sh takes one of them,
# the other with later commits.
set(FREEKV_DEVICE_ARCHITECTURES "80;90" CACHE STRING "Architectures that device code is compiled for and interpreted as")
set(freekv_device_code)
foreach(architecture ${FREEKV_DEVICE_ARCHITECTURES})
  list(APPEND freekv_device_code -gencode=arch=compute_${architecture},code=compute_${architecture})
endforeach()
function(freekv_compile_cuda name)
  cmake_parse_arguments(PARSE_ARGV 1 compile "" OBJECT "")
  if(NOT compile_OBJECT)
    set(compile_OBJECT ${name})
  endif()
  if(freekv_machine_code)
    list(FILTER compile_UNPARSED_ARGUMENTS EXCLUDE REGEX "^-gencode")
    list(APPEND compile_UNPARSED_ARGUMENTS ${freekv_machine_code})
  endif()
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${compile_OBJECT}.o)
  string(REPLACE " " "\\ " target "${object}")  # nvcc does not escape it
  add_custom_command(OUTPUT ${object}
                     COMMAND ${freekv_nvcc_compile} ${compile_UNPARSED_ARGUMENTS} -MT ${target} -MD -MF ${object}.d -o ${object} -c
                             ${CMAKE_CURRENT_SOURCE_DIR}/${name}.cu
                     DEPENDS ${name}.cu DEPFILE ${object}.d COMMENT "nvcc ${compile_OBJECT}.o" VERBATIM)
  set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
endfunction()
# Programs of machine code are made to be carried to another machine: they look for the runtime library beside themselves.
function(freekv_put_cudart_beside)
  if(FREEKV_CUDA_MACHINE_CODE)
    configure_file(${freekv_cudart} ${CMAKE_CURRENT_BINARY_DIR}/libcudart.so.13 COPYONLY)
    set_target_properties(${ARGN} PROPERTIES BUILD_RPATH "\$ORIGIN")
  endif()
endfunction()
mark_as_advanced(FREEKV_NVCC)
