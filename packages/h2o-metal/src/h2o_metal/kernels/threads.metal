const h2o::Threads t = {
    thread_index_in_threadgroup, threads_per_threadgroup.x, thread_index_in_simdgroup,
    simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
