# Builds and runs CONSUMER, a C program, against the C library, taken as WAY says: install_tree or build_tree. Nothing of
# FreeKV's C++ headers and of a CUDA toolkit is looked for.
include(${CMAKE_CURRENT_LIST_DIR}/../package/run.cmake)

file(REMOVE_RECURSE ${WORK})
set(configure ${CMAKE_COMMAND} -S ${CONSUMER} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_C_COMPILER=${CC}
    -DCMAKE_CXX_COMPILER=${CXX} -DSTATIC=${STATIC} -DEXAMPLE=${EXAMPLE} -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
    -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF)
if(WAY STREQUAL "install_tree")
  run(${CMAKE_COMMAND} --install ${FREEKV_BUILD} --prefix ${WORK}/prefix)
  run(${configure} -DCMAKE_PREFIX_PATH=${WORK}/prefix)
  file(GLOB_RECURSE headers RELATIVE ${WORK}/prefix/include ${WORK}/prefix/include/*.h)
  if(NOT headers STREQUAL "freekv/c_api.h")
    message(FATAL_ERROR "Installed C headers: ${headers}")
  endif()
elseif(WAY STREQUAL "build_tree")
  run(${configure} -Dfreekv_DIR=${FREEKV_BUILD})
else()
  message(FATAL_ERROR "Unknown way ${WAY}")
endif()
file(READ ${WORK}/build/compile_commands.json commands)
if(commands MATCHES "cuda|cccl|\\+\\+20")
  message(FATAL_ERROR "A C program is compiled with more than the header needs:\n${commands}")
endif()
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/engine)
message("${output}")
