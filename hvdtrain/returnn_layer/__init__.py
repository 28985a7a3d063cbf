"""What a RETURNN config for plain PyTorch finds where it imports `returnn`: a few names of RETURNN's, made of hvdtrain's own.

`imports.py` decides who sees them, `stand_ins.py` lists them, `adapter.py` puts them around the config's functions;
the other files are the names themselves.
"""
