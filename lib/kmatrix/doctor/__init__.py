"""What a machine has for training, what is missing, and what to do about it."""

from kmatrix.doctor.checks import Check as Check
from kmatrix.doctor.checks import Level as Level
from kmatrix.doctor.checks import places as places
from kmatrix.doctor.gpus import gpus as gpus
from kmatrix.doctor.machine import machine as machine
from kmatrix.doctor.torch import torch as torch
