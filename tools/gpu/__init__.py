"""Parts of `gpu_check.py` and `cuda_compile.py`: trainings, contenders, results, and a GPU that is not there."""
