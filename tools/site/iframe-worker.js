// The search of a page that is opened as a file, for which browsers start no worker: its script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.document.open()
      inside.postMessage = data => {
        const message = new MessageEvent("message", { data })
        this.onmessage?.(message)
        this.dispatchEvent(message)
      }
      inside.importScripts = (...scripts) => {
        for (const script of scripts) inside.document.write(`<script src="${script}"></script>`)
      }
      this.inside = new Promise(resolve => frame.addEventListener("load", () => resolve(inside)))
      inside.document.write(`<!doctype html><script src="${url}"></script>`)
      inside.document.close()
    }

    postMessage(data) {
      this.inside.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
}
