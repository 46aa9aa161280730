# Builds and runs the consumer against FreeKV, taken as WAY says: install_tree, build_tree, subdirectory or
# archive, which is fetched.
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(REMOVE_RECURSE ${WORK})
set(configure ${CMAKE_COMMAND} -S ${CONSUMER} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF
    "-DCUDAToolkit_ROOT=${CUDA_ROOT}")
if(WAY STREQUAL "install_tree")
  run(${CMAKE_COMMAND} --install ${FREEKV_BUILD} --prefix ${WORK}/prefix)
  run(${configure} -DCMAKE_PREFIX_PATH=${WORK}/prefix)
  set(headers ${WORK}/prefix/include)
elseif(WAY STREQUAL "build_tree")
  run(${configure} -Dfreekv_DIR=${FREEKV_BUILD})
  set(headers ${FREEKV_SOURCE}/include)
elseif(WAY STREQUAL "subdirectory")
  run(${configure} -DFREEKV_SOURCE=${FREEKV_SOURCE})
  set(headers ${FREEKV_SOURCE}/include)
elseif(WAY STREQUAL "archive")
  file(MAKE_DIRECTORY ${WORK})
  run(${CMAKE_COMMAND} -E chdir ${FREEKV_SOURCE} ${CMAKE_COMMAND} -E tar czf ${WORK}/freekv.tar.gz
      CMakeLists.txt LICENSE cmake include)
  run(${configure} -DFREEKV_ARCHIVE=${WORK}/freekv.tar.gz)
  set(headers ${WORK}/build/_deps/freekv-src/include)
else()
  message(FATAL_ERROR "Unknown way ${WAY}")
endif()

# The headers under test, and the CUDA headers as system headers.
file(READ ${WORK}/build/compile_commands.json commands)
string(REPLACE "\\\"" "" commands "${commands}")  # paths with spaces are quoted
string(REGEX MATCH "\"command\": [^\n]*consumer[^\n]*main.cpp\"" command "${commands}")
string(FIND "${command}" " ${headers} " as_system)
string(FIND "${command}" "-I${headers} " as_own)
if(as_system EQUAL -1 AND as_own EQUAL -1)
  message(FATAL_ERROR "The consumer does not use the headers in ${headers}:\n${command}")
endif()
foreach(folder ${CUDA_INCLUDE})
  string(FIND "${command}" "-isystem ${folder} " position)
  if(position EQUAL -1)
    message(FATAL_ERROR "${folder} is not a system include folder of the consumer:\n${command}")
  endif()
endforeach()
if(NOT command MATCHES "-std=(c|gnu)\\+\\+(20|2[ab]|23)")
  message(FATAL_ERROR "The consumer is not compiled as C++20:\n${command}")
endif()

run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/engine)
message("${output}")
