"""The device on which tests with the marker `device` run: the first CUDA device that torch finds, or else the CPU."""

import pytest
import torch

__all__ = ["DEVICE", "needs_cuda"]

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

needs_cuda = pytest.mark.skipif(DEVICE.type == "cpu", reason="torch finds no CUDA device: streams need one")
