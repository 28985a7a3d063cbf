# Compiles once what Horovod's build compiles once per framework. CMake includes this file right after Horovod's project().
#
# Horovod adds its 30 common files to the library of each framework, and builds Gloo for each library. With current
# frameworks both compilations are the same: one C++ standard, one ABI, TensorFlow's Eigen. Here the common files become one
# object library that both link, compiled in a few large files (a unity build), since most of the time goes into the headers
# that all of them include. The frameworks' own files become object libraries, too: make compiles the files of a library only
# after the libraries it depends on, and PyTorch's binding, the largest file, has to start first.
#
# CMake finds these modules first. For a torch with CUDA, Horovod's FindPytorch.cmake turns CUDA on wherever torch finds a CUDA
# toolkit: CUDA is removed from what it has found. With CUDA, CMake's own FindCUDAToolkit takes the place of Horovod's copy of
# 2020, which does not find the headers and libraries of a toolkit whose nvcc is a script elsewhere.
list(PREPEND CMAKE_MODULE_PATH ${CMAKE_BINARY_DIR}/hvdtrain)
if(HVDTRAIN_WITHOUT_CUDA)
    file(WRITE ${CMAKE_BINARY_DIR}/hvdtrain/FindPytorch.cmake [[
include(${PROJECT_SOURCE_DIR}/cmake/Modules/FindPytorch.cmake)
set(Pytorch_CUDA FALSE)
list(FILTER Pytorch_LIBRARIES EXCLUDE REGEX "cuda|NOTFOUND")
]])
elseif(EXISTS ${CMAKE_ROOT}/Modules/FindCUDAToolkit.cmake)
    file(WRITE ${CMAKE_BINARY_DIR}/hvdtrain/FindCUDAToolkit.cmake
        "include(\${CMAKE_ROOT}/Modules/FindCUDAToolkit.cmake)\n")
endif()

# The rest is not done with CUDA or ROCm (which add files), with two ABIs, or with an old CMake.
if(CMAKE_VERSION VERSION_LESS 3.20)
    return()
endif()
cmake_language(DEFER CALL hvdtrain_compile_once)

# Adds the object library NAME of these files, compiled with the flags of the target LIBRARY in the folder DIRECTORY.
function(hvdtrain_objects name library directory files)
    add_library(${name} OBJECT ${files})
    get_directory_property(flags DIRECTORY ${directory} DEFINITION CMAKE_CXX_FLAGS)
    get_directory_property(definitions DIRECTORY ${directory} COMPILE_DEFINITIONS)
    get_target_property(includes ${library} INCLUDE_DIRECTORIES)
    separate_arguments(flags)
    target_compile_options(${name} PRIVATE ${flags})
    target_compile_definitions(${name} PRIVATE ${definitions})
    target_include_directories(${name} SYSTEM PRIVATE ${includes})
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

function(hvdtrain_compile_once)
    if(HAVE_CUDA OR HAVE_SUB_PROJECT_CUDA OR HAVE_ROCM)
        return()
    endif()
    set(libraries)
    foreach(library pytorch tensorflow)
        if(TARGET ${library})
            list(APPEND libraries ${library})
        endif()
    endforeach()
    get_directory_property(torch_abi DIRECTORY horovod/torch DEFINITION Pytorch_CXX11)
    get_directory_property(tensorflow_abi DIRECTORY horovod/tensorflow DEFINITION Tensorflow_CXX11)
    if(TARGET pytorch AND TARGET tensorflow AND NOT "${torch_abi}" STREQUAL "${tensorflow_abi}")
        return()
    endif()

    # The common files are compiled with TensorFlow's flags if it is there: its binding includes Eigen, too, and the flags
    # set Eigen's alignment.
    list(GET libraries -1 last)
    set(folder_of_pytorch horovod/torch)
    set(folder_of_tensorflow horovod/tensorflow)
    foreach(library ${libraries})
        get_target_property(own ${library} SOURCES)
        list(REMOVE_ITEM own ${SOURCES})
        hvdtrain_objects(objects_of_${library} ${library} ${folder_of_${library}} "${own}")
    endforeach()
    hvdtrain_objects(objects_of_both ${last} ${folder_of_${last}} "${SOURCES}")
    set_target_properties(objects_of_both PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
    if(TARGET pytorch)
        set_target_properties(objects_of_pytorch PROPERTIES UNITY_BUILD ON)
    endif()
    foreach(library ${libraries})
        set_target_properties(${library} PROPERTIES
            SOURCES "$<TARGET_OBJECTS:objects_of_${library}>;$<TARGET_OBJECTS:objects_of_both>"
            LINKER_LANGUAGE CXX)
        # Without the path of this environment's frameworks, the wheel works in every environment with these versions: Horovod
        # imports the framework before its own library, so the framework's libraries are already loaded. MPI's path stays.
        set_target_properties(${library} PROPERTIES SKIP_BUILD_RPATH ON)
        foreach(file ${MPI_LIBRARIES})
            get_filename_component(folder ${file} DIRECTORY)
            target_link_options(${library} PRIVATE "LINKER:-rpath,${folder}")
        endforeach()
    endforeach()

    if(TARGET gloo)
        set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 20)
        # It defines names that other files of Gloo define, too.
        set_source_files_properties(${PROJECT_SOURCE_DIR}/third_party/gloo/gloo/allreduce.cc
            TARGET_DIRECTORY gloo PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
    if(TARGET compatible17_gloo)
        set_target_properties(compatible17_gloo PROPERTIES EXCLUDE_FROM_ALL ON)
        get_target_property(linked tensorflow LINK_LIBRARIES)
        list(TRANSFORM linked REPLACE "^compatible17_gloo$" gloo)
        set_target_properties(tensorflow PROPERTIES LINK_LIBRARIES "${linked}")
    endif()
endfunction()
