# nvshmem-info links the driver library, which on a machine without a driver is the toolkit's stub.
get_filename_component(toolkit_bin "${CMAKE_CUDA_COMPILER}" DIRECTORY)
get_filename_component(toolkit "${toolkit_bin}" DIRECTORY)
find_library(STANDIN_CUDA_DRIVER cuda HINTS ${toolkit}/lib64 ${toolkit}/lib64/stubs "$ENV{CUDA_HOME}/lib64/stubs")
if(NOT STANDIN_CUDA_DRIVER)
  message(FATAL_ERROR "nvshmem-info links to the CUDA driver, and neither libcuda.so nor a stub of it was found in ${toolkit}/lib64/stubs")
endif()
message(STATUS "CUDA ${STANDIN_CUDA_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}, driver library ${STANDIN_CUDA_DRIVER}")
