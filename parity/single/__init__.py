"""One op of anybody's kernel, without a model: its inputs drawn, its outputs judged.

`contract` says what goes in and comes out, `drawing` makes inputs, `given` turns them into the step that twins read,
`verdict` judges. Source: docs/single.md §1.
"""
