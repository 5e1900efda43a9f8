// Nothing of the CUDA driver is needed; see cuda_runtime_api.h.
#pragma once
