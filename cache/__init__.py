"""The ground layer: caches that know nothing of tensors, graphs or devices' meaning.

`trie` names recorded programs, `computation` holds compiled graphs, `constants` holds uploaded host constants.
Imports nothing else of this project.
"""
