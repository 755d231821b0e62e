_simulations_completion() {
    local line="${COMP_LINE:0:$COMP_POINT}" words cur reply
    COMPREPLY=()
    [[ "$line" =~ ^[^[:space:]]*python[0-9.]*[[:space:]]+-m[[:space:]]+simulations[[:space:]] ]] || return 0
    words="simulations ${line#"${BASH_REMATCH[0]}"}"
    cur="${line##*[[:space:]]}"
    while IFS= read -r reply; do
        [[ "$reply" == plain,* ]] && reply="${reply#plain,}" || continue  # files are the shell's
        [[ "$reply" == "$cur"* ]] || continue
        [[ "$reply" == *= ]] && compopt -o nospace 2>/dev/null
        [[ "$cur" == *=* ]] && reply="${reply#*=}"
        COMPREPLY+=("$reply")
    done < <(COMP_WORDS="$words" COMP_CWORD=$(($(wc -w <<<"$words") - $([ -n "$cur" ] && echo 1 || echo 0))) \
        VARIABLE=complete_bash "${line%%[[:space:]]*}" -m simulations 2>/dev/null)
}
complete -o default -F _simulations_completion python python3
