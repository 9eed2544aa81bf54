"""Every test process uses one thread: small tensors gain nothing from more, and waiting threads cost the others."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: kernels run on the CPU, interpreted
torch.set_num_threads(1)
