# The options of NVSHMEM, each also an environment variable of the same name at first configure, with NVSHMEM's defaults.
set(STANDIN_BUILD_VARIABLES "")
macro(nvshmem_option name default)
  if(DEFINED ENV{${name}})
    option(${name} "" "$ENV{${name}}")
  else()
    option(${name} "" ${default})
  endif()
  if(${name})
    string(APPEND STANDIN_BUILD_VARIABLES " ${name}=ON")
  else()
    string(APPEND STANDIN_BUILD_VARIABLES " ${name}=OFF")
  endif()
endmacro()

foreach(name DEBUG DEVEL TRACE VERBOSE IBGDA_SUPPORT IBGDA_SUPPORT_GPUMEM_ONLY IBDEVX_SUPPORT UCX_SUPPORT LIBFABRIC_SUPPORT SHMEM_SUPPORT
             PMIX_SUPPORT USE_NCCL BUILD_BITCODE_LIBRARY BUILD_PACKAGES BUILD_PYTHON_DEVICE_LIB TIMEOUT_DEVICE_POLLING ENV_ALL)
  nvshmem_option(NVSHMEM_${name} OFF)
endforeach()
foreach(name IBRC_SUPPORT MPI_SUPPORT USE_GDRCOPY USE_MLX5DV NVTX BUILD_TESTS BUILD_EXAMPLES BUILD_PYTHON_LIB BUILD_HYDRA_LAUNCHER
             BUILD_TXZ_PACKAGE)
  nvshmem_option(NVSHMEM_${name} ON)
endforeach()
string(STRIP "${STANDIN_BUILD_VARIABLES}" STANDIN_BUILD_VARIABLES)

if(NVSHMEM_MPI_SUPPORT)
  find_package(MPI REQUIRED)
endif()

# What the stand-in does not have must be switched off by name, as a lean build of the real project does.
foreach(name SHMEM_SUPPORT PMIX_SUPPORT UCX_SUPPORT LIBFABRIC_SUPPORT USE_NCCL BUILD_TESTS BUILD_EXAMPLES BUILD_PYTHON_LIB
             BUILD_PYTHON_DEVICE_LIB BUILD_HYDRA_LAUNCHER BUILD_TXZ_PACKAGE BUILD_BITCODE_LIBRARY BUILD_PACKAGES)
  if(NVSHMEM_${name})
    message(FATAL_ERROR "NVSHMEM_${name}=ON: the CPU stand-in cannot build that; configure with -DNVSHMEM_${name}=OFF")
  endif()
endforeach()

if(NVSHMEM_USE_GDRCOPY)
  if(NOT GDRCOPY_HOME AND DEFINED ENV{GDRCOPY_HOME})
    set(GDRCOPY_HOME "$ENV{GDRCOPY_HOME}")
  endif()
  find_path(GDRCOPY_INCLUDE gdrapi.h HINTS /usr/local/gdrcopy/include /usr/local/gdrdrv/include ${GDRCOPY_HOME}/include NO_DEFAULT_PATH)
  if(NOT GDRCOPY_INCLUDE)
    message(FATAL_ERROR "NVSHMEM_USE_GDRCOPY=ON but there is no gdrapi.h in GDRCOPY_HOME (${GDRCOPY_HOME})")
  endif()
  message(STATUS "GDRCopy: ${GDRCOPY_INCLUDE}")
endif()
