"""The learning rate: of an epoch (`rates`, `newbob`), of a step (`steps`), and the file that remembers it (`file`)."""
