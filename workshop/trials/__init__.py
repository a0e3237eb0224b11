"""What is measured: plans and peers on the same work, in one run, over limited links.

`suite` runs the benchmark; start reading there. `cases` defines contenders and trials, `links` the bytes between nodes,
`models` whole training steps, and `measure` runs trials on ranks. `sparse` measures windows and packed documents;
`memory` compares the peak memory of training with the planner's estimate, and `against` two source trees.
"""
