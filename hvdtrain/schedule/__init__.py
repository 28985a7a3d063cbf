"""The learning rate of an epoch (`rates`) and of a step (`steps`), its file (`file`); scores and stopping."""
