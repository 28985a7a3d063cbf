"""The learning rate of an epoch (`rates`, `newbob`) and of a step (`steps`), its file (`file`); scores, stopping (`history`)."""
