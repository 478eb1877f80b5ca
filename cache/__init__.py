"""The ground layer: caches that know nothing of tensors, graphs or devices' meaning.

In: keys that can be hashed, values, bytes. Out: the same again, least recently used gone first. `trie` names recorded
programs, `computation_cache` holds compiled graphs, `constants` uploaded host constants, `disk` artefacts.

Imports nothing else of this project.
"""
