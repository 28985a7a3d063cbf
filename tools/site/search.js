// A message that is pasted into the search is found by its words: names and numbers in it differ from case to case.
const common = /^(rank|ranks|epoch|step|steps|expected|with|that|this|from|none|other|others|config|command|line)$/

document.addEventListener("paste", event => {
  const input = event.target
  if (!input.matches?.(".md-search__input")) return
  const pasted = event.clipboardData.getData("text")
  const sign = pasted.match(/\b(expected|unknown key)\b/)?.[0].split(" ")[0] // most messages have one of them, the rows of keys do not
  const parts = pasted.split(/[\s,;:()'"?]+/).map(word => word.replace(/^[+-]+|\.$/g, "")) // + and - are the search's own in front
  const fixed = sign === "unknown" ? /^[a-z]{3,}$/ : /^[A-Za-z_.+-]{4,}$/ // without names of keys, which other pages have
  const words = parts.filter(word => fixed.test(word) && (sign ? word !== sign : !common.test(word)))
  if (words.length < (sign ? 2 : 3)) return
  event.preventDefault()
  input.value = (sign ? words.concat(`+${sign}`) : words.map(word => `text:${word}`)).join(" ") // names of keys are titles
  input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }))
})
