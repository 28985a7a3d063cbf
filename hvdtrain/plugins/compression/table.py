"""The compressions by name; their code imports a framework."""

from hvdtrain.learner.compression import Compression

QUANTIZED = ("hvdtrain.plugins.compression.quantized", "Quantized")

POWERSGD = Compression(None, over_horovod=True, compressor=("hvdtrain.plugins.compression.power_sgd", "PowerSGD"))
INT8, INT4, INT2 = (Compression(None, over_horovod=True, compressor=QUANTIZED, bits=bits) for bits in (8, 4, 2))
