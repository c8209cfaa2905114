"""How far a right kernel can be from the exact result, element by element, from inputs and formats only.

`bounded` carries values with their bounds through arithmetic, `spans` composes whole operations, `codes` handles
quantised output. Source: docs/judge.md §3 to §5.
"""
