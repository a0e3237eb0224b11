import torch

torch.set_num_threads(1)  # ranks are forked from this process, which must not have used OpenMP threads
